"""What a restart need not generate again of rollouts that had not ended."""

from pathlib import Path

from kinlog_builders import Story
from kinlog_progress_parts import progress_in

from kinlog.lineage.store import LocalStore
from kinlog.replay.recovery.inventory import expected_inventory
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.replay.recovery.progress import resumed_by, written_tokens
from kinlog.schemas.reasons import Granularity, Reason
from kinlog.workers.engines import GeneratedTokens


async def write(directory: Path, attempt: tuple[int, int, int], tokens: int) -> None:
    journal, rollout = progress_in(directory, attempt)
    rollout.begin_call(0, b"p" * 16, GeneratedTokens([1] * tokens, [-1.0] * tokens, [0] * tokens))
    await journal.write()


def planned(told: Story) -> RecoveryPlan:
    return plan_recovery(
        told.p, expected_inventory(told.p), checkpoint=None, promised=None, policy=RecoveryPolicy()
    )


async def test_siblings_in_flight_go_on_from_what_is_written_down(tmp_path: Path):
    told = Story()
    group_id = told.generating(siblings=3)
    await write(tmp_path, (group_id, 0, 1), 7)
    await write(tmp_path, (group_id, 1, 1), 4)
    await write(tmp_path, (99, 1, 1), 50)
    found = resumed_by(planned(told), told.p, LocalStore(), tmp_path, max_resumes=3)
    assert found == (2, 11)


async def test_newest_attempt_counts_and_only_while_the_budget_lasts(tmp_path: Path):
    told = Story()
    group_id = told.generating(siblings=1)
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    told.dispatch(group_id)
    await write(tmp_path, (group_id, 0, 1), 4)
    await write(tmp_path, (group_id, 0, 2), 9)
    plan = planned(told)
    assert resumed_by(plan, told.p, LocalStore(), tmp_path, max_resumes=3) == (1, 9)
    assert resumed_by(plan, told.p, LocalStore(), tmp_path, max_resumes=1) == (0, 0)


async def test_group_that_is_redone_whole_goes_on_from_nothing(tmp_path: Path):
    told = Story()
    group_id = told.generating(siblings=2, granularity=Granularity.PROMPT_GROUP)
    await write(tmp_path, (group_id, 0, 1), 7)
    plan = planned(told)
    assert plan.superseded
    assert resumed_by(plan, told.p, LocalStore(), tmp_path, max_resumes=3) == (0, 0)


def test_run_without_progress_has_none(tmp_path: Path):
    assert written_tokens(LocalStore(), tmp_path / "absent", {(0, 0, 1)}) == {}
