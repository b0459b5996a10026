"""A run of several segments and epochs with a checkpoint, and ways to damage it."""

from collections.abc import Callable
from pathlib import Path

from kinlog_run_fixtures import DiskRun

from kinlog.lineage.segment import scan_segment
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason

#: Far below what a configuration allows: a segment of a few frames.
SEGMENT_BYTES = 9000


def damageable_run(path: Path) -> DiskRun:
    """Three lives: one that rolled over and was killed, one that was closed, one that was closed again.

    Every frame is one unit, so that there are many; the checkpoint is in the middle of the first life.
    """
    run = DiskRun(path, segment_bytes=SEGMENT_BYTES)
    _in_small_frames(run)
    told = run.story
    first, second = told.finalized(raw_reward=0.25), told.finalized(granularity=Granularity.PROMPT_GROUP)
    told.train(first, second)
    run.checkpoint()
    third = told.generating(siblings=3)
    told.seal(third, 0)
    told.supersede(third, 1, Reason.WORKER_LOST)
    dropped = told.generating()
    told.commit(e.GroupDropped(group_id=dropped, reason=Reason.EVICTED))
    run.kill()
    for _ in range(2):
        run.restart()
        _in_small_frames(run)
        told = run.story
        for group in list(run.p.live_groups()):
            told.dispatch(group.group_id)
            told.seal(group.group_id)
            told.start_finalize(group.group_id)
            told.finish_finalize(group.group_id)
        told.train(told.finalized(raw_reward=0.5))
        run.close()
    return run


def _in_small_frames(run: DiskRun) -> None:
    """Make the writer end a frame after each unit, so that a log has the same frames on every machine."""
    commit = run.story.commit

    def commit_alone(*events: e.Event) -> int:
        seq = commit(*events)
        run.position()
        return seq

    run.story.commit = commit_alone  # type: ignore[method-assign]


def segments_of(log: Path) -> list[Path]:
    return sorted(log.glob("*.arrows"))


def change(path: Path, edit: Callable[[bytearray], object]) -> None:
    """Edit a file's bytes in place."""
    content = bytearray(path.read_bytes())
    edit(content)
    path.write_bytes(content)


def flip(path: Path, offset: int) -> None:
    """Flip one bit."""

    def flipped(content: bytearray) -> None:
        content[offset] ^= 4

    change(path, flipped)


def frame_of(path: Path, place: int) -> slice:
    """Where a frame with events lies in its segment, by its place from 0; negative ones count from the end."""
    frame = scan_segment(memoryview(path.read_bytes())).frames[1:][place]
    return slice(frame.offset, frame.end)
