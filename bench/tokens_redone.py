"""Tokens that a crash costs: generated before it, and generated again after it.

A run is simulated whose completions have heavy-tailed lengths, and is killed at random moments. What kinlog redoes is
decided by its own planner over the projection at that moment, with and without the row journal, and with and without the
tokens that siblings under way had written down. Beside it stands what is redone where less is kept, computed from the same
moment: only the trainer's checkpoint, and finished groups as of that checkpoint.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from measure import Comparison, Setup, compare, run_bench
from msgspec.structs import replace
from simulated_run import dispatched_event, reserved_event, sealed_event

from kinlog.lineage.decide import resumable_attempts
from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection
from kinlog.replay.projection import decode_projection, encode_projection
from kinlog.replay.recovery.inventory import Inventory, expected_inventory
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind
from kinlog.schemas.settings import RolloutRecoverySettings, RowJournalSettings

SIBLINGS = 16
LIVE_GROUPS = 64
SLOTS = 512
GROUPS_PER_STEP = 16
STEPS_PER_CHECKPOINT = 4
#: How long an optimizer step takes. Generating the groups of one takes less: finished groups wait.
STEP_TICKS = 4_500
#: Lognormal completion lengths: half are below 2,000 tokens, one in a hundred is above 27,000, and 32,768 is the limit.
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 2_000, 1.12, 32_768
#: A tick is a token of each slot. How long it takes decides how many are not written down yet when the run is killed.
TOKENS_A_SECOND = 30


class Crash(NamedTuple):
    """The run at the moment when it is killed."""

    p: Projection
    """With the trainer's effects rolled back to the checkpoint."""
    checkpoint: e.Position
    under_way: dict[tuple[int, int], int]
    """Group and generation of the siblings under way -> tokens generated so far."""
    unwritten: int
    """Tokens that each of these has generated since they were last written down, unless it began later."""


class SimulatedTraining:
    """Groups are drawn as permits are free, generated at one token a slot and tick, and applied as soon as they suffice."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.p = Projection()
        self.tick = 0
        self.checkpoint = e.Position(1, 0, 0)
        self.checkpoint_step = 0
        self._trainer_is_free = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._ends: list[tuple[int, int, int, int]] = []
        """When, group, generation, tokens."""
        self._ready: deque[int] = deque()
        self._next_group = 0

    def _tell(self, event: e.Event) -> None:
        fold(self.p, e.RecordedEvent(self.p.last_seq + 1, 1, self.tick, event))

    def advance(self) -> None:
        """Go on to the next end of a sibling."""
        while sum(1 for _ in self.p.live_groups()) < LIVE_GROUPS:
            self._tell(reserved_event(self._next_group, SIBLINGS, self.p.train_step))
            self._tell(e.GroupAdmitted(group_id=self._next_group))
            self._waiting.extend((self._next_group, generation) for generation in range(SIBLINGS))
            self._next_group += 1
        while self._waiting and len(self._ends) < SLOTS:
            group_id, generation = self._waiting.popleft()
            tokens = min(MOST_TOKENS, 1 + int(MEDIAN_TOKENS * self._chance.lognormvariate(0, SIGMA)))
            self._tell(dispatched_event(group_id, generation, 1, self.p.train_step))
            heapq.heappush(self._ends, (self.tick + tokens, group_id, generation, tokens))
        self.tick, group_id, generation, tokens = heapq.heappop(self._ends)
        sealed = sealed_event(group_id, generation, 1, calls=1, weight_version=self.p.train_step)
        self._tell(replace(sealed, completion_tokens=tokens))
        if all(sibling.sealed is not None for sibling in self.p.groups[group_id].siblings.values()):
            self._finalize(group_id)
        if len(self._ready) >= GROUPS_PER_STEP and self.tick >= self._trainer_is_free:
            self._step()

    def _finalize(self, group_id: int) -> None:
        self._tell(e.FinalizeStarted(group_id=group_id))
        rows = tuple(e.CanonicalRowRef(generation, 1, 1, bytes(16)) for generation in range(SIBLINGS))
        self._tell(e.GroupFinalized(group_id=group_id, rows=rows, valid_fraction=1.0))
        self._ready.append(group_id)

    def _step(self) -> None:
        self._trainer_is_free = self.tick + STEP_TICKS
        step = self.p.train_step + 1
        group_ids = tuple(self._ready.popleft() for _ in range(GROUPS_PER_STEP))
        for group_id in group_ids:
            self._tell(e.GroupClaimed(group_id=group_id, train_step=step))
        self._tell(e.StepApplied(train_step=step, group_ids=group_ids))
        self._tell(e.WeightsPublished(weight_version=step, train_step=step))
        if step % STEPS_PER_CHECKPOINT == 0:
            self.checkpoint, self.checkpoint_step = e.Position(1, self.p.last_seq, 0), step
            self._tell(
                e.CheckpointCommitted(
                    name=f"step_{step:06d}",
                    checkpoint_kind=CheckpointKind.TRAINER,
                    train_step=step,
                    position=self.checkpoint,
                    frontier_step=step,
                )
            )

    def crash(self) -> Crash:
        """Return what a restart finds if the run is killed now."""
        p = decode_projection(encode_projection(self.p))
        restored = e.RunRestored(
            checkpoint=f"step_{self.checkpoint_step:06d}",
            position=self.checkpoint,
            train_step=self.checkpoint_step,
            weight_version=self.checkpoint_step,
        )
        fold(p, e.RecordedEvent(p.last_seq + 1, 1, self.tick, restored))
        under_way = {
            (group, sibling): tokens - (end - self.tick) for end, group, sibling, tokens in self._ends
        }
        settings = RowJournalSettings()
        written_every = min(settings.progress_every_s * TOKENS_A_SECOND, settings.progress_every_tokens)
        return Crash(p, self.checkpoint, under_way, self.tick % int(written_every))


def trainer_checkpoint_only(crash: Crash) -> int:
    """Everything that is not in the trainer's weights is generated again."""
    return _sealed_tokens(crash, lambda group_finalized_seq: True) + sum(crash.under_way.values())


def finished_groups(crash: Crash) -> int:
    """Groups that were finished when the checkpoint was taken are kept, and no part of any other."""
    return _sealed_tokens(crash, lambda finalized_seq: not 0 < finalized_seq <= crash.checkpoint.seq) + sum(
        crash.under_way.values()
    )


def _sealed_tokens(crash: Crash, redone: Callable[[int], bool]) -> int:
    return sum(
        sibling.sealed.completion_tokens
        for group in crash.p.live_groups()
        if redone(group.finalized_seq)
        for sibling in group.siblings.values()
        if sibling.sealed is not None
    )


def kinlog_without_journal(crash: Crash) -> int:
    """Rows of siblings that were sealed after the checkpoint are gone with the data plane's memory."""
    promised = crash.checkpoint.seq
    everything = expected_inventory(crash.p, finalized_through_seq=promised)
    gone = {
        (group.group_id, sibling.generation)
        for group in crash.p.live_groups()
        for sibling in group.siblings.values()
        if sibling.sealed is not None and sibling.sealed_seq > promised
    }
    staging = {
        key: tag for key, tag in everything.staging.items() if (tag.group_id, tag.generation) not in gone
    }
    return _redone(crash, _plan(crash, Inventory(staging, everything.training)))


def kinlog_with_journal(crash: Crash) -> int:
    """Rows that the data plane lacks are put back before the inventory is taken."""
    return _redone(crash, _plan_with_journal(crash))


def kinlog_with_prefixes(crash: Crash) -> int:
    """And what is cut off goes on after the tokens that were written down."""
    plan = _plan_with_journal(crash)
    again = plan.lost_tokens
    for attempt in plan.superseded:
        p, identity = crash.p, (attempt.group_id, attempt.generation)
        fold(p, e.RecordedEvent(p.last_seq + 1, 1, 0, attempt))
        group = p.groups[attempt.group_id]
        resumes = RolloutRecoverySettings().resumes
        goes_on = resumable_attempts(group, group.siblings[attempt.generation], max_resumes=resumes)
        generated = crash.under_way.get(identity, 0)
        again += min(generated, crash.unwritten) if goes_on else generated
    return again


def _plan_with_journal(crash: Crash) -> RecoveryPlan:
    return _plan(crash, expected_inventory(crash.p, finalized_through_seq=crash.checkpoint.seq))


def _plan(crash: Crash, inventory: Inventory) -> RecoveryPlan:
    return plan_recovery(
        crash.p, inventory, checkpoint="c", promised=crash.checkpoint, policy=RecoveryPolicy()
    )


def _redone(crash: Crash, plan: RecoveryPlan) -> int:
    again = [(attempt.group_id, attempt.generation) for attempt in plan.superseded]
    return plan.lost_tokens + sum(crash.under_way.get(identity, 0) for identity in again)


def measure_tokens(setup: Setup) -> Sequence[Comparison]:
    """Kill the run again and again, and count what is generated twice."""
    crashes, warm_up, apart = (4, 2_000, 400) if setup.smoke else (60, 8_000, 700)
    chance = random.Random(7)
    training = SimulatedTraining(chance)
    contenders: dict[str, Callable[[Crash], int]] = {
        "kinlog": kinlog_with_prefixes,
        "kinlog, prefix: discard": kinlog_with_journal,
        "kinlog, row journal off": kinlog_without_journal,
        "finished groups, at the checkpoint": finished_groups,
        "trainer checkpoint only": trainer_checkpoint_only,
    }
    costs: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(crashes):
        for _ in range(warm_up if number == 0 else chance.randint(1, 2 * apart)):
            training.advance()
        crash = training.crash()
        for name, redone in contenders.items():
            # Each gets a projection of its own: what is redone is decided by folding it on.
            own = crash._replace(p=decode_projection(encode_projection(crash.p)))
            costs[name].append(redone(own) / 1000)
    case = (
        f"{LIVE_GROUPS} live groups x {SIBLINGS} siblings, {SLOTS} at a time, lengths lognormal (median "
        f"{MEDIAN_TOKENS:,}), a checkpoint every {STEPS_PER_CHECKPOINT} steps of {GROUPS_PER_STEP} groups"
    )
    note = (
        f"without prefixes it is what the siblings under way had generated; with them, what was not written down yet, at "
        f"{TOKENS_A_SECOND} tokens a second"
    )
    return [compare(case, "k tokens a crash", costs, note=note)]


if __name__ == "__main__":
    run_bench("tokens_redone", "Tokens that a crash costs, with heavy-tailed lengths", measure_tokens)
