"""The end of a run that is told to stop: what is about to finish is sealed, then a checkpoint if there is time for one.

Nothing hangs on it: a kill in the middle loses no sealed sibling either. It saves what was nearly finished, and the steps
since the last checkpoint.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.runtime import Runtime
from kinlog.lineage import decide
from kinlog.lineage.state import GroupPhase
from kinlog.schemas.errors import CheckpointError, PreemptedError
from kinlog.schemas.reasons import CheckpointKind, Reason

__all__ = ["ask_to_stop", "rest", "end_when_asked"]

#: A checkpoint is begun when this many times the last one's seconds are left: saves differ, and one that is cut off is of
#: no use.
_CHECKPOINT_MARGIN = 1.25
#: A save of the data plane that hangs keeps everybody out for as long as its own time-out. The end waits no longer than
#: this for it: whoever told the run to stop will not.
_GIVING_UP_LIMIT_S = 5.0


def ask_to_stop(runtime: Runtime) -> None:
    """Begin nothing new from now on. Asking again changes nothing."""
    if not runtime.stop.asked:
        runtime.stop.asked_at_s = asyncio.get_running_loop().time()
        runtime.changes.notify()


async def rest(runtime: Runtime) -> None:
    """Say that training has come to rest, and rest until cancelled."""
    runtime.stop.training_rests = True
    runtime.changes.notify()
    await asyncio.get_running_loop().create_future()


async def end_when_asked(runtime: Runtime, checkpointer: Checkpointer, *, grace_s: float) -> None:
    """Wait until the run is told to stop; then let what is under way finish, for as long as there is time, and stop.

    Parameters
    ----------
    grace_s:
        How long after the request the run may take.

    Raises
    ------
    PreemptedError
        Always: the run was told to stop, and has come to rest.
    LogWriteError
        The log failed.
    """
    deadline_s = grace_s + await runtime.changes.wait_for(lambda: runtime.stop.asked_at_s)
    sealed_before = runtime.projection.sealed_total
    saved = await _save_in_time(runtime, checkpointer, deadline_s)
    await _until(runtime, deadline_s, lambda: _is_quiet(runtime) and runtime.stop.training_rests)
    given_up = await _give_up_in_time(runtime)
    raise PreemptedError(
        f"the run was told to stop, and has, at step {runtime.projection.train_step}: "
        f"{runtime.projection.sealed_total - sealed_before} siblings were sealed and {given_up} in the "
        f"grace period; {saved}. Go on with: kinlog train CONFIG --run-dir {runtime.directory.path} --resume"
    )


async def _save_in_time(runtime: Runtime, checkpointer: Checkpointer, deadline_s: float) -> str:
    """Take a checkpoint as late as there is time for one, and say what came of it."""
    if not runtime.config.checkpointing.enabled:
        return "checkpoints are switched off"
    # Without a measured one it is tried once nothing else is left to wait for.
    needed_s = _CHECKPOINT_MARGIN * (checkpointer.last_seconds or 0.0)
    begin_s = deadline_s - needed_s
    clock_s = asyncio.get_running_loop().time
    # Asked before the wait: a timer is always a little late, and what is begun then would always seem to be too late.
    is_too_late = clock_s() > begin_s
    await _until(runtime, begin_s, lambda: _is_quiet(runtime) and runtime.stop.training_rests)
    save = _save_of_use(runtime, checkpointer)
    if save is None and not runtime.stop.training_rests:
        return "no checkpoint, since a step was still trained on"
    if save is None:
        return "no new checkpoint, since the last one and the row journal have everything"
    if is_too_late:
        return f"no checkpoint, since it would have taken {needed_s:.1f} s"
    if clock_s() >= deadline_s:
        return "no checkpoint, since there was no time left for one"
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            saved = await save()
    except TimeoutError:
        if not limit.expired():
            raise
        return "no checkpoint, since it took too long"
    except CheckpointError as error:
        return f"no checkpoint: {error}"
    return f"no checkpoint, since it failed: {saved.problem}" if saved.problem else f"checkpoint {saved.name}"


def _save_of_use(
    runtime: Runtime, checkpointer: Checkpointer
) -> Callable[[], Awaitable[SavedCheckpoint]] | None:
    """Return what saves anything that is not safe yet: steps that were trained since the last trainer checkpoint, or else
    rollouts that are in no row journal."""
    p = runtime.projection
    steps = [c.train_step for c in p.checkpoints if c.kind is CheckpointKind.TRAINER]
    if runtime.stop.training_rests and p.train_step not in steps:
        return checkpointer.save
    return None if runtime.config.row_journal.enabled else checkpointer.save_rollout


def _is_quiet(runtime: Runtime) -> bool:
    """Whether no attempt is running, and no group on its way into the replay buffer."""
    return not any(
        group.phase in (GroupPhase.READY, GroupPhase.FINALIZING)
        or any(sibling.running for sibling in group.siblings.values())
        for group in runtime.projection.live_groups()
    )


async def _until(runtime: Runtime, deadline_s: float, condition: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout_at(deadline_s):
            await runtime.changes.wait_for(lambda: True if condition() else None)
    except TimeoutError:
        return


async def _give_up_in_time(runtime: Runtime) -> str:
    """Give up what still runs, and say so."""
    try:
        async with asyncio.timeout(_GIVING_UP_LIMIT_S):
            return f"{await _give_up_attempts(runtime)} attempts given up"
    except TimeoutError:
        return "no attempt given up, since a checkpoint kept everybody out"


async def _give_up_attempts(runtime: Runtime) -> int:
    """Record that what still runs is given up, and return how much. Were it left to the restart, siblings would be charged
    with a death of the controller that there was not."""
    given_up = 0
    async with runtime.barrier.cut("preempt") as cut:
        for group in list(runtime.projection.live_groups()):
            for sibling in group.siblings.values():
                if sibling.running:  # its cohort may have gone with the one before
                    superseded = decide.supersede_attempt(
                        runtime.projection, group.group_id, sibling.generation, Reason.PREEMPTED
                    )
                    runtime.ledger.commit(cut, *superseded)
                    given_up += len(superseded)
    return given_up
