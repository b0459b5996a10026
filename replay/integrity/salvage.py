"""Salvage: a copy of a damaged log, elsewhere, that can be opened and replayed, and an account of what is not in it."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import projection_digest
from kinlog.lineage.store import LocalStore, Store, write_durably
from kinlog.replay.checkpoints import TEMPORARY_PREFIX, find_checkpoints
from kinlog.replay.integrity.left_out import LeftOut, left_out_object, read_region
from kinlog.replay.integrity.salvage_plan import SalvagePlan, plan_salvage
from kinlog.replay.projection import project
from kinlog.schemas.errors import LogDamagedError, LogWriteError, RunExistsError

__all__ = ["LEFT_OUT_NAME", "Salvage", "salvage_log"]

#: Where what cannot be replayed goes, beside the salvaged log.
LEFT_OUT_NAME = "left_out"


class Salvage(msgspec.Struct, frozen=True, kw_only=True):
    """What was saved of a log, and what was not."""

    source: str
    target: str
    run_id: str
    log_id: str
    events: int
    """How many events the copy holds, from the first on."""
    last_seq: int
    """The last of them; 0 when nothing could be saved, and there is no copy."""
    segments: tuple[str, ...]
    faults: tuple[str, ...]
    """Why the log is refused: one for each place where trust ended."""
    impossible: str
    """The first event that does not fit those before it; empty when all fit that verify."""
    left_out: tuple[LeftOut, ...]
    missing: tuple[tuple[int, int], ...]
    """Ranges of seq, past the last event saved, of which nothing is left to read."""
    checkpoints: tuple[str, ...]
    """Checkpoints of the run that lie in the copy: a restart can go on from them."""
    checkpoints_lost: tuple[str, ...]
    """Checkpoints whose place in the log is not in the copy."""
    exported: tuple[str, ...]
    """Files with what was left out, under the target."""


def salvage_log(
    run: RunDirectory, target: Path, *, export: bool = False, store: Store | None = None
) -> Salvage:
    """Write what can be saved of a run's log to ``target/log``. The run is not changed.

    Parameters
    ----------
    target:
        A directory that does not exist, or is empty.
    export:
        Also write what is left out to ``target/left_out``: the bytes as they are, and the events in them that verify, one
        JSON object a line. They cannot be replayed.

    Raises
    ------
    RunExistsError
        The target holds something.
    RunNotFoundError
        There is no log.
    LogUnsupportedError
        The log was written by a newer kinlog: that one can salvage it.
    LogWriteError
        The target cannot be written.
    """
    store = store or LocalStore()
    _refuse_occupied(run, target)
    plan = plan_salvage(run.log, store=store)
    try:
        if plan.kept:
            _write_log(store, plan, target)
        exported = tuple(_export(store, plan, target)) if export else ()
    except OSError as error:
        raise LogWriteError(
            f"the salvaged log cannot be written to {target}: {error}. {run.log} was not changed. Free or repair the disk, "
            "or choose another directory."
        ) from error
    inside, outside = _checkpoints(run, plan)
    first_seq = plan.first_seq if plan.kept else 1
    return Salvage(
        source=str(run.log),
        target=str(target),
        run_id=plan.run_id,
        log_id=plan.log_id,
        events=plan.last_seq - first_seq + 1 if plan.kept else 0,
        last_seq=plan.last_seq,
        segments=tuple(file.name for file in plan.kept),
        faults=tuple(_told(fault) for fault in plan.faults),
        impossible=plan.impossible,
        left_out=plan.left_out,
        missing=plan.missing,
        checkpoints=inside,
        checkpoints_lost=outside,
        exported=exported,
    )


def _refuse_occupied(run: RunDirectory, target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunExistsError(
            f"{target} is not an empty directory: expected one that is new or empty, since a salvaged log goes elsewhere and "
            "never over anything. Choose another directory."
        )
    if target.resolve().is_relative_to(run.log.resolve()):
        raise RunExistsError(f"{target} is inside of the damaged log. Choose a directory elsewhere.")


def _write_log(store: Store, plan: SalvagePlan, target: Path) -> None:
    """Write the kept files under another name, replay them, and only then call them a log."""
    building = target / f"{TEMPORARY_PREFIX}log"
    store.make_directory(building)
    for file in plan.kept:
        data = plan.view.read(plan.view.source_of(file.name).path.with_name(file.name))
        write_durably(store, building / file.name, bytes(data[: file.size_bytes]))
    store.sync_directory(building)
    copied = scan_log(building, store=store)
    if copied.end.seq != plan.last_seq or projection_digest(project(copied)) != projection_digest(
        plan.projection
    ):
        raise OSError(f"{building} does not read back as it was written")
    store.rename(building, target / "log")
    store.sync_directory(target)


def _export(store: Store, plan: SalvagePlan, target: Path) -> Iterator[str]:
    """Write what is left out as it is: bytes, and events as JSON lines. Yields the files' paths under the target."""
    directory = target / LEFT_OUT_NAME
    store.make_directory(directory)
    for part in plan.left_out:
        region = plan.region_of(part)
        name = f"{part.segment}.{part.offset_bytes}"
        write_durably(store, directory / name, region.content)
        yield f"{LEFT_OUT_NAME}/{name}"
        _, events = read_region(region)
        lines = [json.dumps(left_out_object(part.segment, event), ensure_ascii=False) for event in events]
        if lines:
            write_durably(store, directory / f"{name}.jsonl", "".join(f"{line}\n" for line in lines).encode())
            yield f"{LEFT_OUT_NAME}/{name}.jsonl"
    store.sync_directory(directory)
    store.sync_directory(target)


def _checkpoints(run: RunDirectory, plan: SalvagePlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = [
        (c.path.name, (c.manifest.position.seq, c.manifest.position.checksum))
        for c in find_checkpoints(run.checkpoints, log_id=plan.log_id, verify=False)
        if c.manifest is not None and c.usable
    ]
    inside = tuple(name for name, mark in found if mark in plan.marks)
    return inside, tuple(name for name, _ in found if name not in inside)


def _told(fault: LogDamagedError) -> str:
    return (
        f"{fault.what}: {fault.segment}, byte {fault.offset_bytes}, after seq {fault.seq}: expected {fault.expected}, "
        f"found {fault.found}"
    )
