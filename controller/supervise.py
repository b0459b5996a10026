"""Supervision: the run's long tasks, watched together, and one failure surfaced when several happen."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from kinlog.controller.runtime import Runtime
from kinlog.lineage.state import GroupPhase
from kinlog.schemas.errors import DataPlaneError, StalledError

__all__ = ["supervise", "probe_health", "watch_progress", "first_cause", "describe_waiting"]


async def supervise(tasks: Sequence[tuple[str, Coroutine[object, object, None]]], *, until: str) -> None:
    """Run tasks together until the one named ``until`` returns; then cancel the others.

    The others are watched to the very end, also after one of them has returned: a failure while ``until`` drains is
    seen. When several have failed by the time anyone looks, the first in the given order is raised, and the others are
    attached to it as notes. What cleaning up raises is attached too, and masks nothing; after a good end it is raised.
    """
    running = {asyncio.create_task(coroutine, name=name): name for name, coroutine in tasks}
    order = [name for name, _ in tasks]
    pending = set(running)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failures = {running[task]: error for task in done if (error := _failure(task)) is not None}
            if failures:
                raise _surface(order, failures)
            if any(running[task] == until for task in done):
                break
    except BaseException as error:
        stopped = await _stop(pending)
        for name in order:
            if name in stopped:
                for leaf in _leaves(stopped[name]):
                    error.add_note(f"the {name} task failed while it was stopped: {leaf!r}")
        raise
    if stopped := await _stop(pending):
        raise _surface(order, stopped)


def _failure(task: "asyncio.Task[None]") -> BaseException | None:
    if task.cancelled():
        # Left alone, this would look as if the whole run had been cancelled, by nobody.
        return RuntimeError(f"the {task.get_name()} task was cancelled, and not by its supervisor")
    return task.exception()


async def _stop(tasks: "set[asyncio.Task[None]]") -> dict[str, BaseException]:
    """Cancel tasks and wait for them. Returns what they raised instead of ending."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ended = [task for task in tasks if not task.cancelled()]
    return {task.get_name(): error for task in ended if (error := task.exception()) is not None}


def _surface(order: list[str], failures: dict[str, BaseException]) -> BaseException:
    names = [name for name in order if name in failures]
    cause, *others = _leaves(failures[names[0]])
    cause.add_note(f"raised by the {names[0]} task")
    for other in others:
        cause.add_note(f"the {names[0]} task raised this too: {other!r}")
    for name in names[1:]:
        for leaf in _leaves(failures[name]):
            cause.add_note(f"the {name} task failed too: {leaf!r}")
    return cause


def first_cause(error: BaseException) -> BaseException:
    """Return the first single exception inside nested groups."""
    return _leaves(error)[0]


def _leaves(error: BaseException) -> list[BaseException]:
    """Return all single exceptions inside nested groups, in order."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in _leaves(member)]


async def probe_health(
    probes: Sequence[tuple[str, Callable[[], Awaitable[None]]]],
    *,
    interval_s: float,
    timeout_s: float,
    max_failed: int,
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    """Ask every part whether it lives, again and again.

    Raises
    ------
    DataPlaneError
        One of them has failed to answer ``max_failed`` times in a row.
    """
    failed = dict.fromkeys((name for name, _ in probes), 0)
    while True:
        await sleep(interval_s)
        for name, probe in probes:
            try:
                async with asyncio.timeout(timeout_s):
                    await probe()
            except Exception as error:
                failed[name] += 1
                if failed[name] >= max_failed:
                    raise DataPlaneError(
                        f"the {name} failed {max_failed} health probes in a row; the last: {error!r}. "
                        "Look at its log, then resume the run."
                    ) from error
            else:
                failed[name] = 0


async def watch_progress(
    runtime: Runtime, *, stall_timeout_s: float, clock_s: Callable[[], float] = time.monotonic
) -> None:
    """Watch that something is recorded now and then.

    Raises
    ------
    StalledError
        Nothing was, for ``stall_timeout_s``.
    """
    last_seq, since = runtime.projection.last_seq, clock_s()
    while True:
        await runtime.sleep(min(1.0, stall_timeout_s / 4))
        if runtime.projection.last_seq != last_seq:
            last_seq, since = runtime.projection.last_seq, clock_s()
        elif clock_s() - since >= stall_timeout_s:
            raise StalledError(
                f"nothing was recorded for {stall_timeout_s:g} s after seq {last_seq}. {describe_waiting(runtime)}"
            )


def describe_waiting(runtime: Runtime) -> str:
    """Say what waits for what: groups by step and phase, permits, worker slots, the barrier, open calls and pauses."""
    p, config = runtime.projection, runtime.config
    live = list(p.live_groups())
    phases = {phase: [g.group_id for g in live if g.phase is phase] for phase in GroupPhase}
    steps = Counter((g.train_step, g.phase.value) for g in live if g.train_step is not None)
    running = [
        f"{group.group_id}/{sibling.generation} attempt {sibling.attempt}"
        for group in live
        for sibling in group.siblings.values()
        if sibling.running
    ]
    parts = [
        f"{len(ids)} {phase}: groups {ids[:8]}{' ...' if len(ids) > 8 else ''}"
        for phase, ids in phases.items()
        if ids
    ]
    by_step = [f"step {step}: {count} {phase}" for (step, phase), count in sorted(steps.items())]
    return (
        f"Step {p.train_step} of {config.trainer.max_steps}; the next needs "
        f"{config.trainer.groups_per_step} finalized groups. {'; '.join(parts) or 'no group is alive'}. "
        f"{'Drawn for ' + ', '.join(by_step[:16]) + '. ' if by_step else ''}"
        f"Running siblings: {', '.join(running[:8]) or 'none'}{' ...' if len(running) > 8 else ''}. "
        f"Permits: {p.alive_total} of {config.rollout.max_live_groups} are taken; {runtime.budget}; {runtime.barrier}; "
        f"{runtime.waits}."
    )
