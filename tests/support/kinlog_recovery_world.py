"""A run in memory that is killed and restarted, decided by the product's own functions and kept on paper beside it.

What outlives a kill is here: the log up to what was durable (or a little more), the checkpoints with their snapshots,
and what the data plane held at each. Every frame is told to the log first, and to the naive run next.
"""

import pickle
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kinlog_builders import DATASET, LOG_ID, RUN_ID
from kinlog_fake_parts import FakeDataset
from kinlog_lives import run_config
from kinlog_naive_run import NaiveCheckpoint, NaiveRun, Row
from kinlog_plan_judged import assert_as_judged, row_key, row_tag

from kinlog.controller.prompt_source import PromptSource
from kinlog.controller.recovery import frames_of
from kinlog.controller.retention import retain
from kinlog.controller.samplers import Sampler, build_sampler
from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.recovery.inventory import Inventory
from kinlog.replay.recovery.plan import RecoveryPlan, RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.replay.recovery.restore import RestorePoint, restored_event, restored_projection
from kinlog.schemas import events as e
from kinlog.schemas.codec import decode_event, encode_event
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import RowsMissingError, TransitionError
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import CheckpointKind, Partition, Reason
from kinlog.schemas.receipts import canonical_key, staging_key

#: Draws until the dataset is exhausted.
DRAWS = 24


@dataclass(frozen=True)
class Restart:
    """One try to begin the next life: from where, with what lost, configured how, and how far it comes."""

    back: int = 0
    """0 for the newest checkpoint, more for an older one; past the last one, the start of the run."""
    keeps_tail: bool = False
    """The data plane still has what was put after the checkpoint."""
    harm: tuple[tuple[int, str], ...] = ()
    """(which row, ``gone``, ``bad`` or ``half``)."""
    orphan: bool = False
    discards: bool = False
    """All tokens are given up, and the groups keep their prompts."""
    config: dict[str, object] = field(default_factory=dict)
    frame: int = 1024
    """Events of one frame of the plan, at most."""
    stops_after: int | None = None
    """Killed again when it has written so many frames."""
    loses: int = 0
    """Frames of its own that this second kill takes with it."""


class RecoveryWorld:
    def __init__(self, **config: object) -> None:
        self.config: RunConfig = run_config(**config)
        self.sampler: Sampler = build_sampler(self.config.sampler, groups_per_step=1)
        self.prompts = PromptSource(FakeDataset(size=DRAWS), seed=0, max_epochs=1)
        self.naive = NaiveRun()
        self.plane: dict[Row, str] = {}
        self.log: list[e.RecordedEvent] = []
        self.p = Projection()
        self.epoch = 1
        self._snapshots: dict[str, tuple[Manifest, bytes]] = {}
        self._unacknowledged: list[tuple[int, bytes]] = []
        """Before each frame that a kill may still take: the log's length, and the naive run."""
        self._shadow = encode_projection(self.p)
        self.configure(config)
        opened = e.RunOpened(
            run_id=RUN_ID, kinlog_version="0", config_digest=bytes(16), dataset_fingerprint=DATASET, seed=0
        )
        self.commit(opened, e.WriterOpened(host="here", pid=1))
        self.acknowledge()

    def configure(self, config: dict[str, object]) -> None:
        self.config = run_config(**config)
        self.sampler = build_sampler(self.config.sampler, groups_per_step=self.config.trainer.groups_per_step)

    # ---- the log ----------------------------------------------------------------------------------------------

    def commit(self, *events: e.Event) -> None:
        """Record one frame. It may be lost until something is acknowledged."""
        self._unacknowledged.append((len(self.log), pickle.dumps(self.naive)))
        for event in events:
            record = e.RecordedEvent(len(self.log) + 1, self.epoch, 0, decode_event(encode_event(event)))
            fold(self.p, record)
            self.log.append(record)

    def acknowledge(self) -> None:
        """Everything so far is durable."""
        self._unacknowledged.clear()

    def refuses(self, event: e.Event, pattern: str) -> None:
        """This event may not come next, and leaves no trace."""
        before = encode_projection(self.p)
        with pytest.raises(TransitionError, match=pattern):
            fold(self.p, e.RecordedEvent(len(self.log) + 1, self.epoch, 0, event))
        assert encode_projection(self.p) == before

    def replayed(self, start: bytes | None = None) -> Projection:
        """The log, folded from its beginning or from a snapshot."""
        p = decode_projection(start) if start is not None else Projection()
        for record in self.log[p.last_seq :]:
            fold(p, record)
        return p

    def check_tail(self) -> None:
        """The snapshot of a moment ago and what was recorded since are the live projection."""
        p = self.replayed(self._shadow)
        self._shadow = encode_projection(p)
        assert self._shadow == encode_projection(self.p)

    def kill(self, loses: int = 0) -> None:
        """End the life; of the frames that nobody was promised, the last few are lost."""
        lost = min(loses, len(self._unacknowledged))
        if lost:
            length, naive = self._unacknowledged[-lost]
            del self.log[length:]
            self.naive = pickle.loads(naive)
        self._unacknowledged.clear()
        replayed = self.replayed()
        assert lost or encode_projection(replayed) == encode_projection(self.p)
        self.p = replayed
        self._shadow = encode_projection(self.p)

    # ---- rows -------------------------------------------------------------------------------------------------

    def put(self, rows: set[Row]) -> None:
        self.plane.update(dict.fromkeys(rows, "good"))

    def clear(self, rows: set[Row], partition: Partition, reason: Reason) -> None:
        """Record, durably, and remove."""
        present = sorted(row for row in rows if row in self.plane)
        if present:
            groups = tuple(sorted({row[0] for row in present}))
            self.commit(
                e.RowsCleared(partition=partition, reason=reason, num_rows=len(present), group_ids=groups)
            )
            self.acknowledge()
            for row in present:
                del self.plane[row]

    def clear_group(self, number: int, reason: Reason) -> None:
        for partition, length in ((Partition.STAGING, 4), (Partition.TRAINING, 3)):
            rows = {row for row in self.plane if row[0] == number and len(row) == length}
            self.clear(rows, partition, reason)

    def inventory(self) -> Inventory:
        staging = {staging_key(*row): row_tag(row, held) for row, held in self.plane.items() if len(row) == 4}
        training = {
            canonical_key(*row): row_tag(row, held) for row, held in self.plane.items() if len(row) == 3
        }
        return Inventory(staging, training)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save(self, *, trainer: bool) -> str:
        """Make the directory of a checkpoint; the log has yet to hear of it."""
        self.acknowledge()
        naive = self.naive
        name = f"checkpoint-{len(self._snapshots)}"
        manifest = Manifest(
            kind=CheckpointKind.TRAINER if trainer else CheckpointKind.ROLLOUT,
            run_id=RUN_ID,
            log_id=LOG_ID,
            kinlog_version="0",
            created_us=0,
            position=e.Position(self.epoch, len(self.log), 0),
            projection_digest="",
            train_step=self.p.train_step,
            weight_version=self.p.weight_version,
            dataset_fingerprint=DATASET,
            draw_cursor=self.p.draw_cursor,
            num_storage_units=1,
            staging_rows=0,
            staging_digest="",
            training_rows=0,
            training_digest="",
            files=(),
        )
        self._snapshots[name] = (manifest, encode_projection(self.p))
        made = NaiveCheckpoint(
            name, len(naive.steps), naive.weights, trainer, naive.relied_on(), dict(self.plane)
        )
        naive.usable.append(made)
        return name

    def record_checkpoint(self, name: str) -> None:
        """Let the log hear of a checkpoint, and forget what no kept one can go back to."""
        manifest, _ = self._snapshots[name]
        trainer = manifest.kind is CheckpointKind.TRAINER
        frontier = self.p.frontier_step
        if trainer:
            kept = retain(
                self.p,
                name=name,
                train_step=manifest.train_step,
                keep=self.config.checkpointing.keep,
                present=frozenset(found.name for found in self.naive.usable),
            )
            frontier = kept.frontier_step
            older = [
                found.step
                for found in self.naive.usable
                if found.trainer and found.name in self.naive.recorded and found.step < manifest.train_step
            ]
            # With two to keep, the one before this one is the oldest that can be gone back to.
            assert frontier == max([self.naive.frontier, *older[-1:]])
        self.commit(self._committed(name, frontier))
        self.naive.checkpointed(name, frontier)

    def _committed(self, name: str, frontier_step: int) -> e.CheckpointCommitted:
        manifest, _ = self._snapshots[name]
        return e.CheckpointCommitted(
            name=name,
            checkpoint_kind=manifest.kind,
            train_step=manifest.train_step,
            position=manifest.position,
            frontier_step=frontier_step,
        )

    # ---- restarts ---------------------------------------------------------------------------------------------

    def restart(self, restart: Restart) -> bool:
        """Begin the next life; ``False`` when it was refused, or killed before it had written its plan."""
        self.configure(restart.config)
        naive, found = self.naive, self._choose(restart.back)
        point = self._restore_point(found)
        self._load(found, restart)
        restored = restored_projection(point)
        for group in restored.live_groups():
            self.prompts.check(group.prompt)
        expected: NaiveRun = pickle.loads(pickle.dumps(naive))
        expected.go_back(found)
        recovery = self.config.rollout_recovery
        verdict = expected.judge(
            self.plane,
            lambda target, oldest: self.is_stale(expected, target, oldest),
            discard_future=recovery.future_weights == "discard",
            discard_all=restart.discards,
        )
        promised = verdict.missed & (found.promised if found is not None else set())
        try:
            plan = plan_recovery(
                restored,
                self.inventory(),
                checkpoint=point.name,
                promised=point.manifest.position if point.manifest is not None else None,
                policy=RecoveryPolicy(
                    missing_rows=recovery.missing_rows,
                    future_weights=recovery.future_weights,
                    discard_rollouts=restart.discards,
                ),
                is_stale=lambda group: self.sampler.is_stale(restored, group),
            )
        except RowsMissingError:
            assert recovery.missing_rows == "refuse"
            assert promised or {row[0] for row in verdict.missed} & naive.chosen_away
            return False
        assert not promised or recovery.missing_rows == "redispatch" or _all_chosen_away(promised, naive)
        assert_as_judged(plan, verdict, expected, self.plane)
        self._carry_out(restart, point, found, plan, {row[0] for row in promised})
        return restart.stops_after is None

    def _choose(self, back: int) -> NaiveCheckpoint | None:
        """As the product would: the newest, an explicit older one, or the start as long as nothing is forgotten."""
        usable = self.naive.usable[::-1]
        assert {c.name for c in self.p.checkpoints} <= {found.name for found in usable}
        places: list[NaiveCheckpoint | None] = [*usable]
        if self.naive.frontier == 0:
            places.append(None)
        return places[back % len(places)]

    def _restore_point(self, found: NaiveCheckpoint | None) -> RestorePoint:
        full = self.replayed()
        if found is None:
            return RestorePoint(None, None, Projection(), full, ())
        manifest, snapshot = self._snapshots[found.name]
        at_end = self.replayed(snapshot)
        assert encode_projection(at_end) == encode_projection(full)
        return RestorePoint(Path(found.name), manifest, decode_projection(snapshot), at_end, ())

    def _load(self, found: NaiveCheckpoint | None, restart: Restart) -> None:
        tail = self.plane if restart.keeps_tail else {}
        self.plane = {**tail, **(found.plane if found is not None else {})}
        rows = sorted(self.plane)
        for which, harm in restart.harm if rows else ():
            row = rows[which % len(rows)]
            if harm == "gone":
                self.plane.pop(row, None)
            else:
                self.plane[row] = harm
        if restart.orphan:
            self.plane[999, 0, 1, 0] = "good"

    def is_stale(self, naive: NaiveRun, target: int | None, oldest: int) -> bool:
        sampler = self.config.sampler
        if sampler.name == "in_order":
            return target is not None and target <= len(naive.steps)
        return naive.weights - oldest > sampler.max_staleness_versions

    def _carry_out(
        self,
        restart: Restart,
        point: RestorePoint,
        found: NaiveCheckpoint | None,
        plan: RecoveryPlan,
        chosen_away: set[int],
    ) -> None:
        """Write the plan frame by frame, and clear rows, until the next kill or to the end."""
        self.epoch += 1
        frames_left = restart.stops_after if restart.stops_after is not None else 1 << 30
        first: list[e.Event] = [e.WriterOpened(host="here", pid=self.epoch), restored_event(point)]
        unrecorded = found is not None and found.name not in {c.name for c in self.p.checkpoints}
        if found is not None and unrecorded:
            # A kill took its event: the restart from it tells the log.
            first.append(self._committed(found.name, self.p.frontier_step))
        self.commit(*first)
        self.naive.go_back(found)
        self.naive.chosen_away |= chosen_away
        if found is not None and unrecorded:
            self.naive.checkpointed(found.name, self.naive.frontier)
        for frame in frames_of(plan.events(), at_most=restart.frame):
            if frames_left == 0:
                return self.kill(restart.loses)
            frames_left -= 1
            self.commit(*frame)
            for event in frame:
                self._tell(event)
        self.acknowledge()
        for reason, by_partition in (
            (Reason.STEP_DURABLE, plan.retired),
            (Reason.UNREFERENCED, plan.unreferenced),
        ):
            for partition, keys in by_partition.items():
                if frames_left == 0:
                    return self.kill(restart.loses)
                frames_left -= 1
                self.clear({row for row in self.plane if row_key(row) in keys}, partition, reason)
        return None

    def _tell(self, event: e.Event) -> None:
        """Keep one decision of a plan on paper."""
        match event:
            case e.FinalizeFailed():
                self.naive.unfinalize(event.group_id, charged=False)
            case e.AttemptSuperseded():
                self.naive.give_up(event.group_id, event.generation, event.reason)
            case e.GroupDropped():
                self.naive.leave(event.group_id, "dropped", event.reason)
            case _:
                assert isinstance(event, e.RecoveryPlanned)


def _all_chosen_away(rows: set[Row], naive: NaiveRun) -> bool:
    return {row[0] for row in rows} <= naive.chosen_away
