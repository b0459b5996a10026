"""What to do about what a verification found, one sentence for each step, with the command that does it."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from kinlog.lineage.run_directory import RunDirectory

__all__ = ["advice_for_checkpoint", "advice_for_damage", "advice_for_impossible_story"]


class IntactCheckpoint(Protocol):
    """What is asked of a checkpoint that can be restored."""

    @property
    def name(self) -> str: ...
    @property
    def train_step(self) -> int | None: ...


def advice_for_damage(
    run: RunDirectory, *, intact: Sequence[IntactCheckpoint], salvageable_seq: int
) -> Iterator[str]:
    """Yield what to do about a damaged log.

    Parameters
    ----------
    intact:
        The checkpoints whose files are as they should be, newest first.
    salvageable_seq:
        The last event that a salvage would keep.
    """
    yield f"Nothing was changed. Copy the run aside before anything else: cp -a {_quoted(run.path)} ELSEWHERE"
    for checkpoint in intact[:1]:
        directory = run.checkpoints / checkpoint.name
        yield (
            f"To go on from step {checkpoint.train_step}, the newest intact checkpoint, in a new run: "
            f"kinlog restore {_quoted(directory)} NEW_RUN"
        )
    yield from _advice_to_salvage(run, salvageable_seq)


def advice_for_impossible_story(run: RunDirectory, *, salvageable_seq: int) -> Iterator[str]:
    """Yield what to do about events that do not fit each other."""
    yield (
        "Every byte is as it was written: a writer has a bug, or events were put there by other means. Report it, with "
        "this output and the log."
    )
    yield from _advice_to_salvage(run, salvageable_seq)


def advice_for_checkpoint(run: RunDirectory, name: str) -> str:
    """Return what to do about a checkpoint that is not what its manifest or the log says."""
    return (
        f"A restart passes over {name} and takes an older one, if there is one. Put it back from a backup, or remove it: "
        f"rm -r {_quoted(run.checkpoints / name)}"
    )


def _advice_to_salvage(run: RunDirectory, salvageable_seq: int) -> Iterator[str]:
    salvage = f"kinlog log salvage {_quoted(run.path)} -o NEW_DIRECTORY --export"
    if salvageable_seq:
        yield (
            f"To have the events up to seq {salvageable_seq} as a log of their own, and what else can still be read as files "
            f"that cannot be replayed: {salvage}"
        )
    else:
        yield f"No event can be replayed. To have what can still be read, as files: {salvage}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
