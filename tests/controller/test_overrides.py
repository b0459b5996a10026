"""Granularity overrides are held against the dataset's own rows, before anything is started."""

from pathlib import Path

import pytest
from kinlog_fake_parts import FakeDataset, FakeItem, FakeParts, FakeStream
from kinlog_lives import Life, run_config
from msgspec.structs import replace

from kinlog.controller.overrides import refuse_unknown_overrides
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.reasons import Granularity
from kinlog.schemas.settings import DatasetSettings, RolloutRecoverySettings, TaskSettings
from kinlog.workers.tasks import TaskMixture

COHORT = Granularity.PROMPT_GROUP
KEYS = [("task_granularity_overrides", "even", "odd"), ("agent_granularity_overrides", "one", "two")]


@pytest.mark.parametrize(("key", "first", "second"), KEYS)
@pytest.mark.parametrize("dataset", [FakeDataset(), FakeStream(4)])
def test_override_for_what_no_prompt_has_is_refused_with_the_names_that_exist(key, first, second, dataset):
    with pytest.raises(
        ConfigError, match=rf"{key}: no prompt of the dataset has 'ghost'.*: {first}, {second}$"
    ):
        refuse_unknown_overrides(RolloutRecoverySettings(**{key: {"ghost": COHORT, first: COHORT}}), dataset)
    refuse_unknown_overrides(RolloutRecoverySettings(**{key: {second: COHORT}}), dataset)


def test_override_for_a_task_that_gets_no_row_is_refused():
    tasks = (
        TaskSettings(name="sums", generator="chain_sum", agent="single_turn", share=3),
        TaskSettings(name="never", generator="gcd", agent="retry"),
    )
    recovery = RolloutRecoverySettings(agent_granularity_overrides={"retry": COHORT})
    with pytest.raises(ConfigError, match="'retry'; those that exist: single_turn"):
        refuse_unknown_overrides(recovery, TaskMixture(DatasetSettings(size=3, tasks=tasks)))
    refuse_unknown_overrides(recovery, TaskMixture(DatasetSettings(size=4, tasks=tasks)))


def test_rows_are_looked_at_only_until_every_name_was_seen():
    class Counted(FakeDataset):
        looked_at = 0

        def __getitem__(self, index: int, /) -> FakeItem:
            Counted.looked_at += 1
            return super().__getitem__(index)

    refuse_unknown_overrides(RolloutRecoverySettings(task_granularity_overrides={"odd": COHORT}), Counted())
    assert Counted.looked_at == 3
    Counted.looked_at = 0
    refuse_unknown_overrides(RolloutRecoverySettings(), Counted())
    assert Counted.looked_at <= 1


class OwnDataset(FakeDataset):
    """Somebody's own: nothing of it is in ``dataset.tasks``."""

    def __getitem__(self, index: int, /) -> FakeItem:
        return replace(super().__getitem__(index), agent_name="judge")


def test_dataset_of_ones_own_is_judged_by_its_own_rows_before_anything_starts(tmp_path: Path):
    fits = run_config(rollout_recovery__agent_granularity_overrides={"judge": COHORT})
    Life(tmp_path / "run", fits, FakeParts(OwnDataset()))
    configured = run_config(rollout_recovery__agent_granularity_overrides={"one": COHORT})
    with pytest.raises(ConfigError, match="'one'; those that exist: judge"):
        Life(tmp_path / "run", configured, FakeParts(OwnDataset()))
    assert not (tmp_path / "run").exists()
