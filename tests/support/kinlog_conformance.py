"""The vocabulary of the conformance suite: given a history, when something happens, then these events and this state.

A history and a happening are both made of *acts*. An act is told the bench, and either decides (it returns events, which
are recorded as one unit), or lives (it returns a coroutine, which is run in virtual time), or begins another life.
Groups are numbered from 0 in the order of their reservations.

Whatever a scenario is about, ``then`` also checks that the log, replayed, is the live projection, and that at no point
of it a drawn prompt is unaccounted for.
"""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from kinlog_bench import Bench
from kinlog_builders import sealed_result
from kinlog_fake_parts import FakeDataset
from kinlog_interleavings import run_by_chance
from kinlog_lives import run_config
from msgspec.structs import replace

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.recovery import carry_out
from kinlog.controller.retention import newly_durable, retain
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.runtime import clear_group_rows
from kinlog.controller.samplers import Draw
from kinlog.controller.supervise import supervise
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage import decide
from kinlog.lineage.fold import fold
from kinlog.lineage.state import GroupPhase, GroupState, Projection, decode_projection, encode_projection
from kinlog.replay.inventory import Inventory, expected_inventory
from kinlog.replay.plan import RecoveryPolicy, plan_recovery
from kinlog.schemas import events as e
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import DataPlaneError, KinlogError
from kinlog.schemas.orders import FinalizeRejected, RolloutOrder
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import CheckpointKind, Granularity, Partition, Reason, Validity
from kinlog.schemas.rows import RowTag
from kinlog.schemas.settings import SamplerSettings

Decided: TypeAlias = "e.Event | tuple[e.Event, ...] | None"
Act: TypeAlias = "Callable[[Bench], Decided | Bench | Coroutine[object, object, Bench | None]]"
Rows: TypeAlias = "dict[Partition, dict[str, RowTag]]"
E = TypeVar("E", bound=e.Event)

SIBLING, COHORT = Granularity.SIBLING, Granularity.PROMPT_GROUP

#: Events about the writers of a log rather than about the run.
_WRITERS = (e.RunOpened, e.WriterOpened)


# ---- given, when, then ------------------------------------------------------------------------------------------


class Given:
    """A run with a history. ``config`` as for ``run_config``: ``rollout__x=1`` sets ``rollout.x``."""

    def __init__(self, *history: Act, dataset: FakeDataset | None = None, **config: object) -> None:
        self._world = _World(_bench(run_config(**config), dataset or FakeDataset()))
        for act in history:
            self._world.do(act)
        self._world.put_what_lineage_expects()

    @property
    def p(self) -> Projection:
        return self._world.bench.p

    def when(self, *acts: Act) -> "Outcome":
        """What happens next, one after the other, until one of them is refused."""
        return Outcome(self._world, acts)


class Outcome:
    """What came of it. ``events`` are those recorded since the ``when``."""

    def __init__(self, world: "_World", acts: Sequence[Act]) -> None:
        self._world = world
        first, before = len(world.events), encode_projection(world.bench.p)
        self._raised: KinlogError | None = None
        try:
            for act in acts:
                world.do(act)
        except KinlogError as error:
            self._raised = error
        self.events = [event for event in world.events[first:] if not isinstance(event, _WRITERS)]
        self.unchanged = encode_projection(world.bench.p) == before

    @property
    def p(self) -> Projection:
        return self._world.bench.p

    @property
    def bench(self) -> Bench:
        return self._world.bench

    @property
    def prefixes(self) -> "Iterable[Projection]":
        """The projection after each event of all lives. It is one object, and changes."""
        return self._world.prefixes()

    def of(self, *kinds: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kinds)]

    def when(self, *acts: Act) -> "Outcome":
        self.then()
        return Outcome(self._world, acts)

    def then(
        self,
        *,
        events: "Sequence[e.Event | Like] | None" = None,
        only: tuple[type[e.Event], ...] = (e.Event,),
        state: "Mapping[int | str, object] | None" = None,
        raises: tuple[type[KinlogError], str] | None = None,
    ) -> "Outcome":
        """Check what came of it.

        Parameters
        ----------
        events:
            All events, or those of the kinds in ``only``, in order.
        state:
            By group id: its phase, ``None`` when it is gone, or some of its facts (see ``facts_of``). By name: fields
            of the projection.
        raises:
            The error's class, and a pattern that its message must contain. It was a refusal, which has changed
            nothing, unless ``events`` says what came before it.
        """
        if self._raised is not None and raises is None:
            raise self._raised
        if raises is not None:
            assert isinstance(self._raised, raises[0]), (
                f"expected {raises[0].__name__}, found {self._raised!r}"
            )
            assert re.search(raises[1], str(self._raised)), str(self._raised)
            assert self.unchanged or events is not None, "it was refused, and changed something"
        if events is not None:
            assert self.of(*only) == list(events), self.of(*only)
        for key, expected in (state or {}).items():
            if isinstance(key, str):
                assert getattr(self.p, key) == expected, key
            else:
                _check_group(key, self.p.groups.get(key), expected)
        self._world.check_log()
        return self


class _World:
    """The lives of a run, and what outlives them: the log, the data plane and its saved copies."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._earlier: list[e.Event] = []

    @property
    def events(self) -> list[e.Event]:
        return [*self._earlier, *self.bench.writer.events]

    def do(self, act: Act) -> None:
        done = act(self.bench)
        if isinstance(done, Coroutine):
            done = run_by_chance(done)
        if isinstance(done, Bench):
            self._earlier += self.bench.writer.events
            self.bench = done
        elif done:
            self.bench.story.commit(*(done if isinstance(done, tuple) else (done,)))

    def put_what_lineage_expects(self) -> None:
        _put_expected(self.bench)
        self.bench.trainer.step_number = self.bench.p.train_step
        self.bench.pool.weight_version = self.bench.p.weight_version

    def prefixes(self) -> Iterable[Projection]:
        p = Projection()
        for seq, event in enumerate(self.events, 1):
            fold(p, e.RecordedEvent(seq, 1, 0, event))
            yield p

    def check_log(self) -> None:
        p = Projection()
        for p in self.prefixes():
            assert p.draw_cursor == p.drawn_total
            assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total
        assert encode_projection(p) == encode_projection(self.bench.p)


class Like:
    """Equal to every event of a kind that has these facts."""

    def __init__(self, kind: type[e.Event], **facts: object) -> None:
        self._kind = kind
        self._facts = facts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self._kind) and all(
            getattr(other, name) == fact for name, fact in self._facts.items()
        )

    def __hash__(self) -> int:
        return hash(self._kind)

    def __repr__(self) -> str:
        return f"{self._kind.__name__}({', '.join(f'{n}={f!r}' for n, f in self._facts.items())}, ...)"


def facts_of(group: GroupState) -> dict[str, object]:
    """Return what a scenario may say about a group."""
    siblings = [group.siblings[g] for g in sorted(group.siblings)]
    return {
        "phase": group.phase,
        "granularity": group.granularity,
        "attempts": tuple(s.attempt for s in siblings),
        "sealed": {s.generation for s in siblings if s.sealed is not None},
        "running": {s.generation for s in siblings if s.running},
        "waiting": {s.generation for s in siblings if s.waiting},
        "validity": tuple(s.sealed.validity if s.sealed is not None else None for s in siblings),
        "infrastructure_failures": tuple(s.infrastructure_failures for s in siblings),
        "data_failures": tuple(s.data_failures for s in siblings),
        "parked_reason": group.parked_reason,
        "min_weight_version": group.min_weight_version,
        "valid_fraction": group.valid_fraction,
        "train_step": group.train_step,
    }


def _check_group(group_id: int, group: GroupState | None, expected: object) -> None:
    if expected is None:
        assert group is None, f"group {group_id} is still there"
        return
    assert group is not None, f"group {group_id} is gone"
    facts = facts_of(group)
    wanted = expected if isinstance(expected, dict) else {"phase": expected}
    assert {name: facts[name] for name in wanted} == wanted, f"group {group_id}"


# ---- acts: the life of a group ----------------------------------------------------------------------------------


def reserved(**facts: object) -> Act:
    """``siblings``, ``granularity``, ``budget``, ``train_step``: as ``Story.reserve``."""
    return lambda bench: _told(bench.story.reserve(**facts))  # type: ignore[arg-type]


def reserving(prompt: PromptRef, *, granularity: Granularity = SIBLING) -> Act:
    """The decision to reserve a group for exactly this prompt."""
    return lambda bench: decide.reserve_group(
        bench.p,
        prompt=prompt,
        num_generations=2,
        granularity=granularity,
        retry_budget=e.RetryBudget(1, 1),
        train_step=None,
    )


def admitted(group_id: int) -> Act:
    return lambda bench: e.GroupAdmitted(group_id=group_id)


def dispatched(group_id: int, *generations: int) -> Act:
    """The next attempt of these generations, or of all that wait."""
    return lambda bench: _told(bench.story.dispatch(group_id, *generations))


def generating(**facts: object) -> Act:
    """A new group, all of whose siblings run."""

    def act(bench: Bench) -> None:
        group_id = bench.story.reserve(**facts)  # type: ignore[arg-type]
        bench.story.admit(group_id)
        bench.story.dispatch(group_id)

    return act


def ready(**facts: object) -> Act:
    """A new group, all of whose siblings are sealed."""
    return lambda bench: _told(bench.story.ready(**facts))  # type: ignore[arg-type]


def finalized(*, train_step: int | None = None, siblings: int = 2, **facts: object) -> Act:
    """A new group with its canonical rows."""

    def act(bench: Bench) -> None:
        story = bench.story
        group_id = story.reserve(siblings=siblings, train_step=train_step)
        story.admit(group_id)
        story.dispatch(group_id)
        story.seal(group_id, **facts)
        story.start_finalize(group_id)
        story.finish_finalize(group_id)

    return act


def finalizing(**facts: object) -> Act:
    """A new group whose finalizer was called, and has not answered."""
    return lambda bench: _told(bench.story.start_finalize(bench.story.ready(**facts)))  # type: ignore[arg-type]


def finalize_started(group_id: int) -> Act:
    return lambda bench: e.FinalizeStarted(group_id=group_id)


def finalize_answered(group_id: int) -> Act:
    return lambda bench: bench.story.finalized_event(group_id)


def sealed(group_id: int, *generations: int, **facts: object) -> Act:
    """Results of these generations, or of all that run, as they are decided about."""
    return lambda bench: _told(bench.story.seal(group_id, *generations, **facts))


def result(group_id: int, generation: int, attempt: int, **facts: object) -> Act:
    """One result arrives, of any attempt; facts beyond those of ``sealed_result`` are set as they are."""
    own = {name: fact for name, fact in facts.items() if name in e.SiblingSealed.__struct_fields__}
    others = {name: fact for name, fact in facts.items() if name not in own}

    def act(bench: Bench) -> Decided:
        arrived = replace(sealed_result(group_id, generation, attempt, **others), **own)  # type: ignore[arg-type]
        return decide.seal_sibling(bench.p, arrived)[1]

    return act


def cohort_results(group_id: int, attempts: Mapping[int, int]) -> Act:
    """The results of a whole cohort arrive: generation -> attempt."""

    def act(bench: Bench) -> Decided:
        results = {g: sealed_result(group_id, g, attempt) for g, attempt in attempts.items()}
        return decide.seal_cohort(bench.p, group_id, results)

    return act


def given_up(group_id: int, generation: int, reason: Reason) -> Act:
    """An attempt is superseded."""
    return lambda bench: decide.supersede_attempt(bench.p, group_id, generation, reason)


def placeholder(group_id: int, generation: int, reason: Reason = Reason.DATA_FAILURE) -> Act:
    """A sibling is given up for good, with a placeholder in its place."""
    return lambda bench: decide.seal_placeholder(bench.p, group_id, generation, reason)


def recorded(*events: e.Event) -> Act:
    """These very events."""
    return lambda bench: events


def dropped(group_id: int, reason: Reason = Reason.STALE) -> Act:
    return recorded(e.GroupDropped(group_id=group_id, reason=reason))


def parked(group_id: int) -> Act:
    return recorded(e.GroupParked(group_id=group_id, reason=Reason.RETRY_BUDGET))


def published(weight_version: int) -> Act:
    return recorded(e.WeightsPublished(weight_version=weight_version, train_step=0))


def claimed(*group_ids: int) -> Act:
    return lambda bench: bench.story.claim(*group_ids)


def trained(*group_ids: int) -> Act:
    return lambda bench: bench.story.train(*group_ids)


def _told(_: object) -> None:
    return None


# ---- acts: checkpoints and restarts -----------------------------------------------------------------------------


def checkpointed() -> Act:
    """A trainer checkpoint, with all rows that lineage relies on."""

    def act(bench: Bench) -> None:
        _put_expected(bench)
        _saved(bench)[bench.p.train_step] = _copied(bench.data_plane.rows)
        bench.story.checkpoint()

    return act


def restarted(
    *,
    lose: Iterable[str] = (),
    alter: Iterable[str] = (),
    add: Mapping[str, RowTag] | None = None,
    tail_rows: bool = False,
    from_start: bool = False,
    discard_rollouts: bool = False,
    **config: object,
) -> Act:
    """The controller is killed, and the next life begins: from the last checkpoint, or from the start.

    Parameters
    ----------
    lose, alter, add:
        Keys of rows that the data plane has lost, or holds with another content; staged rows that nobody wrote.
    tail_rows:
        The data plane still has what was put after the checkpoint.
    from_start:
        Go back to the start of the run, by choice.
    discard_rollouts:
        Have everything that was not trained on generated again, by choice.
    config:
        What the configuration changes to.
    """

    async def act(bench: Bench) -> Bench:
        p = decode_projection(encode_projection(bench.p))
        found = p.checkpoints[-1] if p.checkpoints and not from_start else None
        data_plane = bench.data_plane
        rows = _saved(bench).get(found.train_step) if found is not None else None
        rows = _copied(data_plane.rows if tail_rows else rows or {part: {} for part in Partition})
        for key in lose:
            assert sum(rows[part].pop(key, None) is not None for part in Partition) == 1, key
        for key in alter:
            part = next(part for part in Partition if key in rows[part])
            rows[part][key] = replace(rows[part][key], digest=b"another content.")
        rows[Partition.STAGING].update(add or {})
        config_now = changed(bench.config, **config)
        life = _bench(config_now, bench.dataset, projection=p, data_plane=data_plane)  # type: ignore[attr-defined]
        restored = e.RunRestored(
            checkpoint=found.name if found is not None else None,
            position=found.position if found is not None else None,
            train_step=found.train_step if found is not None else 0,
            weight_version=found.train_step if found is not None else 0,
        )
        rolled_back = decode_projection(encode_projection(life.p))
        fold(rolled_back, e.RecordedEvent(rolled_back.last_seq + 1, 1, 0, restored))
        recovery = life.config.rollout_recovery
        plan = plan_recovery(
            rolled_back,
            Inventory(dict(rows[Partition.STAGING]), dict(rows[Partition.TRAINING])),
            checkpoint=restored.checkpoint,
            promised=restored.position,
            policy=RecoveryPolicy(
                missing_rows=recovery.missing_rows,
                future_weights=recovery.future_weights,
                discard_rollouts=discard_rollouts,
            ),
            is_stale=lambda group: life.runtime.sampler.is_stale(rolled_back, group),
        )
        data_plane.rows = rows
        async with life.runtime.barrier.exclusive("restore") as cut:
            life.runtime.ledger.commit(cut, restored)
            await carry_out(life.runtime, cut, plan)
        life.pool.answers, life.pool.gates = bench.pool.answers, bench.pool.gates
        life.pool.weight_version = life.p.weight_version
        life.trainer.step_number = life.p.train_step
        return life

    return act


def changed(config: RunConfig, **changes: object) -> RunConfig:
    """Return a configuration with ``section__key`` set."""
    for name, value in changes.items():
        section, _, key = name.partition("__")
        part = replace(getattr(config, section), **{key: value})
        config = replace(config, **{section: part})
    return config


def _bench(config: RunConfig, dataset: FakeDataset, **parts: object) -> Bench:
    bench = Bench(config, dataset=dataset, **parts)  # type: ignore[arg-type]
    bench.dataset = dataset  # type: ignore[attr-defined]
    return bench


def _put_expected(bench: Bench) -> None:
    """Let the data plane hold what lineage relies on."""
    expected = expected_inventory(bench.p)
    bench.data_plane.rows[Partition.STAGING].update(expected.staging)
    bench.data_plane.rows[Partition.TRAINING].update(expected.training)


def _copied(rows: Rows) -> Rows:
    return {partition: dict(of_partition) for partition, of_partition in rows.items()}


def _saved(bench: Bench) -> dict[int, Rows]:
    """Train step -> the rows of the checkpoint that was taken there."""
    if "saved_rows" not in vars(bench.data_plane):
        bench.data_plane.saved_rows = {}  # type: ignore[attr-defined]
    saved: dict[int, Rows] = bench.data_plane.saved_rows  # type: ignore[attr-defined]
    return saved


# ---- acts: what the workers will do -----------------------------------------------------------------------------


def worker_fails(group_id: int, generation: int, attempt: int, reason: Reason = Reason.DATA_FAILURE) -> Act:
    return lambda bench: bench.pool.fail(group_id, generation, attempt, reason)


def worker_dies(group_id: int, generation: int, attempt: int) -> Act:
    return lambda bench: bench.pool.lose_worker(group_id, generation, attempt)


def worker_hangs(group_id: int, generation: int, attempt: int) -> Act:
    return lambda bench: _told(bench.pool.hold(group_id, generation, attempt))


def worker_answers_late(group_id: int, generation: int, attempt: int, *, after_s: float) -> Act:
    """The answer comes after so many seconds of virtual time."""

    def act(bench: Bench) -> None:
        run = bench.pool.run

        async def late(worker: str, order: RolloutOrder) -> object:
            if (order.group_id, order.generation, order.attempt) == (group_id, generation, attempt):
                await asyncio.sleep(after_s)
            return await run(worker, order)

        bench.pool.run = late  # type: ignore[method-assign, assignment]

    return act


def worker_cannot_stage(group_id: int, generation: int, attempt: int) -> Act:
    """The data plane refuses an attempt's rows."""

    def refused(order: RolloutOrder) -> e.SiblingSealed:
        raise DataPlaneError("no storage unit answers")

    return lambda bench: bench.pool.answers.__setitem__((group_id, generation, attempt), refused)


def worker_answers(group_id: int, generation: int, attempt: int, validity: Validity) -> Act:
    """An attempt's result is not valid."""

    def act(bench: Bench) -> None:
        bench.pool.answers[group_id, generation, attempt] = lambda order: bench.pool.seal(
            order, validity=validity
        )

    return act


def finalizer_loses_answers(number: int) -> Act:
    """The finalizer dies this often after it has put a group's rows."""
    return lambda bench: setattr(bench.finalizer, "lose_answers", number)


def finalizer_rejects(group_id: int, generation: int, reason: Reason) -> Act:
    """The next finalize of a group finds a sibling's rows no good."""
    rejected = FinalizeRejected(group_id=group_id, generation=generation, reason=reason, detail="scripted")
    return lambda bench: bench.finalizer.reject.__setitem__(group_id, rejected)


# ---- acts: lives ------------------------------------------------------------------------------------------------


def driven(*group_ids: int, wait_s: float = 0.0) -> Act:
    """Groups are driven until they are finalized or have left, side by side, and late answers are waited for."""

    async def act(bench: Bench) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group_id in group_ids:
                tasks.create_task(bench.driver.drive(group_id))
        await asyncio.sleep(wait_s)
        await bench.driver.close()

    return act


def living(until: Callable[[Projection], bool] | None = None) -> Act:
    """A whole life: both pumps, with a checkpoint at every step that the configuration says. It ends by itself, or it is
    killed as soon as a condition holds."""

    async def act(bench: Bench) -> None:
        life = supervise(
            [
                ("rollout", RolloutPump(bench.runtime, bench.driver).run()),
                ("train", TrainPump(bench.runtime, RowKeeper(bench), lambda metrics: None).run()),
            ],
            until="train",
        )
        task = asyncio.create_task(life)
        task.add_done_callback(lambda _: bench.runtime.changes.notify())
        if until is not None:
            await bench.runtime.changes.wait_for(lambda: True if until(bench.p) or task.done() else None)
            assert not task.done(), "the life ended before the condition held"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await task
        await bench.driver.close()

    return act


class RowKeeper(Checkpointer):
    """A checkpointer that writes no files: it keeps a copy of the data plane's rows."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def save(self) -> SavedCheckpoint:
        bench, runtime = self._bench, self._bench.runtime
        async with runtime.barrier.exclusive("checkpoint"):
            position = await runtime.ledger.position()
            step = bench.p.train_step
            _saved(bench)[step] = _copied(bench.data_plane.rows)
        name = f"step_{step:06d}"
        kept = retain(
            bench.p,
            name=name,
            train_step=step,
            keep=bench.config.checkpointing.keep,
            present=frozenset(c.name for c in bench.p.checkpoints),
        )
        durable = newly_durable(bench.p, step)
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            committed = e.CheckpointCommitted(
                name=name,
                checkpoint_kind=CheckpointKind.TRAINER,
                train_step=step,
                position=position,
                frontier_step=kept.frontier_step,
            )
            await runtime.ledger.commit(cut, committed).durable()
            await clear_group_rows(runtime, cut, durable, Reason.STEP_DURABLE)
        return SavedCheckpoint(name, 0.0, 0.0)


class AnyReady:
    """A sampler of somebody's own: as much ahead as there are permits, and whatever is finalized, oldest first."""

    def __init__(self, settings: SamplerSettings, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step

    def may_draw(self, p: Projection) -> Draw | None:
        return Draw(None)

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = [g.group_id for g in p.live_groups() if g.phase is GroupPhase.FINALIZED]
        return tuple(ready[: self._groups_per_step]) if len(ready) >= self._groups_per_step else None

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        return False
