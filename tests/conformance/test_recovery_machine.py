"""The whole of recovery, in any order: what the product decides is what somebody with a pencil would have decided.

The commands on groups are in ``kinlog_machine_attempts`` and ``kinlog_machine_training``. ``KINLOG_RECOVERY_EXAMPLES``
asks for more runs than every build takes.
"""

import os

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from kinlog_machine_attempts import CONFIGS, PICK
from kinlog_machine_training import TrainingCommands
from kinlog_naive_run import RUNNING, SEALED, WAITING, NaiveGroup, Row
from kinlog_recovery_world import Restart

from kinlog.lineage.state import GroupState, encode_projection
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity

EXAMPLES = int(os.environ.get("KINLOG_RECOVERY_EXAMPLES", "100"))

RESTARTS = st.builds(
    Restart,
    back=st.sampled_from([0, 0, 0, 1, 2, 3]),
    keeps_tail=st.booleans(),
    harm=st.lists(st.tuples(PICK, st.sampled_from(["gone", "bad", "half"])), max_size=2).map(tuple),
    orphan=st.booleans(),
    discards=st.sampled_from([False, False, False, True]),
    config=CONFIGS,
    frame=st.sampled_from([1024, 2]),
)
#: Frames after which each next life is killed as well, and how many of them that takes with it.
SECOND_KILLS = st.sampled_from([0, 0, 0, 1, 2, 10]).flatmap(
    lambda number: st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=number, max_size=number)
)


class AnyRun(TrainingCommands):
    """Adds kills and restarts, and what must hold whatever has happened."""

    # ---- kills and restarts --------- -------------------------------------------------------------------------

    @rule(restart=RESTARTS, loses=st.integers(0, 5), half_saves=st.booleans(), second_kills=SECOND_KILLS)
    def kill_and_restart(
        self, restart: Restart, loses: int, half_saves: bool, second_kills: list[tuple[int, int]]
    ) -> None:
        if half_saves:
            self.world.save(trainer=True)  # killed between a checkpoint's rename and its event
        self.world.kill(loses)
        for stops_after, lost in second_kills:
            again = Restart(**{**vars(restart), "stops_after": stops_after, "loses": lost})
            self.begin_again(again)
            self.world.kill()
        if not self.begin_again(restart):
            config = {**restart.config, "rollout_recovery__missing_rows": "redispatch"}
            assert self.begin_again(Restart(**{**vars(restart), "config": config}))
        self.what_is_left_after_a_restart()

    def begin_again(self, restart: Restart) -> bool:
        world = self.world
        before, dispatched = encode_projection(world.p), self.dispatched()
        done = world.restart(restart)
        if not done and restart.stops_after is None:
            assert encode_projection(world.p) == before, "it was refused, and changed something"
        assert self.dispatched() == dispatched, "a restart dispatched something"
        return done

    def dispatched(self) -> int:
        return sum(isinstance(record.event, e.SiblingDispatched) for record in self.world.log)

    def what_is_left_after_a_restart(self) -> None:
        """Nobody runs, nobody is claimed, and no row is there that nobody refers to."""
        naive = self.world.naive
        assert not naive.in_status("claimed")
        assert all(s.status != RUNNING for n in naive.alive() for s in self.group(n).siblings)
        wanted: set[Row] = naive.relied_on()
        for number in naive.in_status("finalizing"):
            wanted |= self.group(number).canonical(number)
        assert set(self.world.plane) <= wanted

    # ---- what must hold ---------------------------------------------------------------------------------------

    @invariant()
    def snapshot_and_tail_are_the_live_projection(self) -> None:
        self.world.check_tail()

    @invariant()
    def nothing_drawn_is_lost(self) -> None:
        p, naive = self.world.p, self.world.naive
        assert p.drawn_total == p.draw_cursor == len(naive.groups)
        assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total
        assert p.alive_total == len(naive.alive())
        assert p.applied_total == len(naive.in_status("applied", "forgotten"))
        assert p.parked_total == len(naive.in_status("parked"))
        dropped: dict[str, int] = {}
        for number in naive.in_status("dropped"):
            why = naive.groups[number].why
            dropped[why] = dropped.get(why, 0) + 1
        assert p.dropped == dropped

    @invariant()
    def groups_stand_as_kept_on_paper(self) -> None:
        p, naive = self.world.p, self.world.naive
        present = [n for n, g in enumerate(naive.groups) if g.status not in ("dropped", "forgotten")]
        assert sorted(p.groups) == present
        for number in present:
            assert_same_group(p.groups[number], self.group(number))
            assert p.groups[number].prompt == self.world.prompts.draw(number)

    @invariant()
    def history_is_as_kept_on_paper(self) -> None:
        p, naive = self.world.p, self.world.naive
        assert (p.train_step, p.weight_version) == (len(naive.steps), naive.weights)
        assert (p.frontier_step, p.exhausted) == (naive.frontier, naive.exhausted)
        assert p.steps == {
            step: tuple(groups) for step, groups in enumerate(naive.steps, 1) if step > naive.frontier
        }
        targets = [group.target for group in naive.groups if group.target is not None]
        assert p.places == {step: targets.count(step) for step in targets if step > naive.frontier}
        trained = [number for groups in naive.steps for number in groups]
        assert len(trained) == len(set(trained))
        assert [c.name for c in p.checkpoints] == naive.recorded
        assert (p.late_rejected, p.restarts, p.superseded) == (naive.late, naive.restarts, naive.superseded)

    @invariant()
    def rows_that_lineage_relies_on_are_there(self) -> None:
        plane = self.world.plane
        assert all(plane.get(row) == "good" for row in self.world.naive.relied_on())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.kill()


def assert_same_group(found: GroupState, expected: NaiveGroup) -> None:
    assert found.phase == expected.status
    assert (found.granularity is Granularity.PROMPT_GROUP) == expected.whole
    assert (found.retry_budget.infrastructure, found.retry_budget.data) == expected.budget
    assert (found.train_step, found.claimed_step) == (expected.target, expected.step)
    assert found.finalize_failures == expected.failed_finalizes
    assert found.min_weight_version == expected.oldest
    for which, sibling in enumerate(expected.siblings):
        state = found.siblings[which]
        status = SEALED if state.sealed is not None else RUNNING if state.running else WAITING
        assert (status, state.attempt) == (sibling.status, sibling.attempt)
        assert (state.infrastructure_failures, state.data_failures) == (sibling.infrastructure, sibling.data)
        assert (state.sealed.raw_reward if state.sealed is not None else 0.0) == sibling.reward


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
