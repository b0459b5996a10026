"""A scenario: given a history, when something happens, then these events and this state."""

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from kinlog_bench import Bench
from kinlog_fake_parts import FakeDataset
from kinlog_interleavings import run_by_chance
from kinlog_lives import run_config
from msgspec.structs import replace

from kinlog.lineage.fold import fold
from kinlog.lineage.state import GroupState, Projection, encode_projection
from kinlog.replay.recovery.inventory import expected_inventory
from kinlog.schemas import events as e
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import KinlogError
from kinlog.schemas.reasons import Granularity, Partition
from kinlog.schemas.rows import RowTag

Decided: TypeAlias = "e.Event | tuple[e.Event, ...] | None"
Act: TypeAlias = "Callable[[Bench], Decided | Bench | Coroutine[object, object, Bench | None]]"
Rows: TypeAlias = "dict[Partition, dict[str, RowTag]]"
E = TypeVar("E", bound=e.Event)

SIBLING, COHORT = Granularity.SIBLING, Granularity.PROMPT_GROUP

#: Events about the writers of a log rather than about the run.
_WRITERS = (e.RunOpened, e.WriterOpened)


class Given:
    """A run with a history. ``config`` as for ``run_config``: ``rollout__x=1`` sets ``rollout.x``."""

    def __init__(self, *history: Act, dataset: FakeDataset | None = None, **config: object) -> None:
        self._world = _World(bench_of(run_config(**config), dataset or FakeDataset()))
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

    @property
    def refused(self) -> bool:
        """Whether an error ended it."""
        return self._raised is not None

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
        put_expected(self.bench)
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


def changed(config: RunConfig, **changes: object) -> RunConfig:
    """Return a configuration with ``section__key`` set."""
    for name, value in changes.items():
        section, _, key = name.partition("__")
        part = replace(getattr(config, section), **{key: value})
        config = replace(config, **{section: part})
    return config


def bench_of(config: RunConfig, dataset: FakeDataset, **parts: object) -> Bench:
    bench = Bench(config, dataset=dataset, **parts)  # type: ignore[arg-type]
    bench.dataset = dataset  # type: ignore[attr-defined]
    return bench


def put_expected(bench: Bench) -> None:
    """Let the data plane hold what lineage relies on."""
    expected = expected_inventory(bench.p)
    bench.data_plane.rows[Partition.STAGING].update(expected.staging)
    bench.data_plane.rows[Partition.TRAINING].update(expected.training)


def copied_rows(rows: Rows) -> Rows:
    return {partition: dict(of_partition) for partition, of_partition in rows.items()}


def saved_rows(bench: Bench) -> dict[int, Rows]:
    """Train step -> the rows of the checkpoint that was taken there."""
    if "saved_rows" not in vars(bench.data_plane):
        bench.data_plane.saved_rows = {}  # type: ignore[attr-defined]
    saved: dict[int, Rows] = bench.data_plane.saved_rows  # type: ignore[attr-defined]
    return saved


def told(_: object) -> None:
    return None
