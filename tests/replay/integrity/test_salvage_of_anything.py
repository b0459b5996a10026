"""Whatever is done to a log, what is salvaged of it is a beginning of what it was: never another history."""

import random
from pathlib import Path

import pytest
from kinlog_damage_oracle import DIRECTORY, damaged_copies, lived_log
from kinlog_golden import log_path
from kinlog_stores import MemoryStore

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.replay.integrity.left_out import intact_frames
from kinlog.replay.integrity.salvage_plan import SalvagePlan, plan_salvage
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError

Files = dict[str, bytes]


def golden(name: str) -> Files:
    return {path.name: path.read_bytes() for path in log_path(name).iterdir() if path.is_file()}


def lived() -> Files:
    return {path.name: content for path, content in lived_log().items()}


def compacted() -> Files:
    store = in_memory(lived())
    compact_log(store, DIRECTORY, epoch=3, checkpoints=[])
    return {path.name: bytes(content) for path, content in store.files.items() if path.parent == DIRECTORY}


LOGS = {
    "lived": lived,
    "compacted": compacted,
    "whole run": lambda: golden("v1/whole_run"),
    "fenced": lambda: golden("v1/fenced"),
    "claimed epochs": lambda: golden("v1/claimed_epochs"),
    "dropped": lambda: golden("v2/dropped"),
}


def in_memory(files: Files) -> MemoryStore:
    return MemoryStore({DIRECTORY / name: content for name, content in files.items()})


def saved(plan: SalvagePlan) -> LogScan:
    """The log that the plan would write."""
    kept = {
        Path(file.name).name: bytes(plan.view.read(DIRECTORY / file.name)[: file.size_bytes])
        for file in plan.kept
    }
    return scan_log(DIRECTORY, store=in_memory(kept))


def opened(files: Files) -> LogScan | LogDamagedError | None:
    """What opening makes of a log, compacted segments read as well; ``None`` when there is none."""
    try:
        scan = scan_log(DIRECTORY, store=in_memory(files))
        for _ in scan.batches():
            pass
    except LogDamagedError as error:
        return error
    except RunNotFoundError:
        return None
    return scan


@pytest.mark.parametrize(("name", "copies"), [(name, 20 if name == "whole run" else 60) for name in LOGS])
def test_what_is_salvaged_of_a_damaged_log_is_the_longest_beginning_of_it(name: str, copies: int):
    files = LOGS[name]()
    whole = list(scan_log(DIRECTORY, store=in_memory(files)).events())
    outcomes = set()
    for what, damaged in damaged_copies(files, random.Random(name), copies):
        found = opened(damaged)
        if not damaged or (name == "fenced" and not _tells_of_the_take_over(damaged)):
            continue
        plan = plan_salvage(DIRECTORY, store=in_memory(damaged))
        outcomes.add(type(found))
        whole_here = whole
        if isinstance(found, LogScan):
            # What opening takes is the log. (Without its newest segment, say, which nobody promised.)
            assert plan.last_seq == found.end.seq, what
            whole_here = list(found.events())
        elif found is not None and found.segment.startswith("segment-"):
            assert plan.last_seq >= found.seq or _was_fenced(plan, found.seq), what
        if plan.kept:
            scan = saved(plan)
            assert list(scan.events()) == [r for r in whole_here if r.seq <= plan.last_seq], what
            assert scan.end.seq == plan.last_seq == plan.projection.last_seq, what
            assert (scan.torn, scan.fenced) == ([], []), what
    assert {LogDamagedError, LogScan} <= outcomes


def _was_fenced(plan: SalvagePlan, refused_at: int) -> bool:
    """Whether a segment that cannot be trusted says that its epoch had begun before the place that opening refused."""
    return any(first_seq <= refused_at for _, first_seq in plan.view.begun)


def _tells_of_the_take_over(files: Files) -> bool:
    """Whether anything is left of the segment that fenced the older writer: without it, nobody can know."""
    data = memoryview(files.get(segment_name(2, 0), b""))
    info = scan_segment(data).info
    return info.epoch == 2 if info is not None else any(f.epoch == 2 for f in intact_frames(data, 0))
