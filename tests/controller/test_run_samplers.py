"""Whole runs by every sampler, and to the end of their datasets."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from kinlog_fake_parts import FakeDataset, FakeParts, FakeStream
from kinlog_lives import Life, assert_conserved, events_of, first_life, next_life, replayed, run_config

from kinlog.controller.samplers import Draw
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.schemas import events as e
from kinlog.schemas.errors import (
    ConfigError,
)
from kinlog.schemas.reasons import Reason, Validity
from kinlog.schemas.settings import SamplerSettings


async def test_more_epochs_are_trained_when_a_later_life_allows_them(tmp_path: Path):
    config = run_config(trainer__max_steps=6, dataset__max_epochs=1)
    await (await first_life(tmp_path / "run", config, FakeParts(FakeDataset(size=6)))).train()
    assert replayed(tmp_path / "run").exhausted
    more = run_config(trainer__max_steps=6, dataset__max_epochs=2)
    resumed = await (await next_life(tmp_path / "run", more, FakeParts(FakeDataset(size=6)))).train()
    assert resumed.p.train_step == 6
    assert_conserved(resumed.p)


@pytest.mark.parametrize("shortfall", ["top_up", "shrink"])
async def test_place_of_a_group_that_left_is_drawn_again_or_the_step_shrinks_and_says_so(
    tmp_path: Path, shortfall: str
):
    config = run_config(
        sampler__name="in_order",
        sampler__shortfall=shortfall,
        rollout__invalid_siblings="keep_masked",
    )
    parts = FakeParts()

    def script(parts: FakeParts) -> None:
        for generation in (0, 1):
            parts.pool.answers[3, generation, 1] = lambda order: parts.pool.seal(
                order, validity=Validity.FAILED
            )

    parts.prepare = script
    life = await (await first_life(tmp_path / "run", config, parts)).train()
    assert life.p.dropped == {Reason.LOW_VALID_FRACTION: 1}
    sizes = [len(event.group_ids) for event in events_of(tmp_path / "run", e.StepApplied)]
    shrunk = [
        (event.train_step, event.reason, event.expected_groups, event.found_groups)
        for event in events_of(tmp_path / "run", e.StepShrunk)
    ]
    if shortfall == "top_up":
        assert (sizes, shrunk) == ([2, 2, 2, 2], [])
    else:
        assert (sizes, shrunk) == ([2, 1, 2, 2], [(2, Reason.SHORTFALL, 2, 1)])
    assert_conserved(life.p)


async def test_streaming_dataset_goes_on_where_the_cursor_stands(tmp_path: Path):
    config = run_config(trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config, FakeParts(FakeStream(40)))
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    drawn = life.p.draw_cursor
    stream = FakeStream(40)
    resumed = await (await next_life(tmp_path / "run", config, FakeParts(stream))).train()
    assert stream.opened[-1] == drawn
    assert resumed.p.train_step == 6
    samples = [event.prompt.sample_id for event in events_of(tmp_path / "run", e.GroupReserved)]
    assert samples == [f"row-{n}" for n in range(len(samples))]
    assert_conserved(replayed(tmp_path / "run"))


class NewestFirst:
    """A sampler of somebody's own."""

    def __init__(self, settings: SamplerSettings, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step

    def may_draw(self, p: Projection) -> Draw | None:
        return Draw(None)

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = [g.group_id for g in p.live_groups() if g.phase is GroupPhase.FINALIZED]
        return tuple(ready[-self._groups_per_step :]) if len(ready) >= self._groups_per_step else None

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        return False


async def test_sampler_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("somebodys_samplers")
    module.NewestFirst = NewestFirst  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = run_config(sampler__name="somebodys_samplers:NewestFirst")
    life = await (await first_life(tmp_path / "run", config)).train()
    assert life.p.train_step == 4
    for name, complaint in (
        ("somebodys_samplers:Oldest", "cannot be made"),
        ("nobodys:Class", "cannot be made"),
        ("random", "expected in_order"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            Life(tmp_path / "other", run_config(sampler__name=name))


async def test_exhausted_dataset_trains_what_is_left_and_ends(tmp_path: Path):
    config = run_config(trainer__max_steps=50, dataset__max_epochs=1)
    life = await (await first_life(tmp_path / "run", config, FakeParts(FakeDataset(size=7)))).train()
    assert [len(event.group_ids) for event in events_of(tmp_path / "run", e.StepApplied)] == [2, 2, 2, 1]
    assert life.p.exhausted
    assert life.p.alive_total == 0
    again = await (await next_life(tmp_path / "run", config, FakeParts(FakeDataset(size=7)))).train()
    assert again.p.train_step == 4


async def test_resume_past_the_last_step_does_nothing_and_ends(tmp_path: Path):
    await (await first_life(tmp_path / "run")).train()
    resumed = await (await next_life(tmp_path / "run")).train()
    assert resumed.parts.pool.calls == []
    assert resumed.p.train_step == 4


@pytest.mark.parametrize("sampler", ["in_order", "windowed", "weight_fifo", "ready_first"])
async def test_every_sampler_trains_to_the_end_through_a_kill(tmp_path: Path, sampler: str):
    config = run_config(sampler__name=sampler, trainer__max_steps=6)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    resumed = await (await next_life(tmp_path / "run", config)).train()
    assert resumed.p.train_step == 6
    assert_conserved(replayed(tmp_path / "run"))
