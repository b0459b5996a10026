"""A process that appends to a log until the disk takes no more, makes room, and goes on. It prints what it saw.

``kinlog_full_disk_child.py DIRECTORY`` fills the device, on which ``DIRECTORY/ballast`` is removed afterwards;
``kinlog_full_disk_child.py DIRECTORY BYTES`` lets no file of the process grow beyond that, which the kernel tells by a short
write first.
"""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from kinlog_builders import append_now, new_log, numbered, reopened

from kinlog.lineage.scan import scan_log
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogWriteError
from kinlog.schemas.reasons import Reason


def main(directory: Path, limit_bytes: int | None) -> None:
    log = directory / "log"
    ballast = directory / "ballast"
    _, no_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes is None:
        ballast.write_bytes(bytes(256 * 1024))
    opened = new_log(log)
    acknowledged = append_now(opened, numbered(1))
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, no_limit))
    errors = []
    try:
        while acknowledged < 10_000:
            acknowledged = append_now(opened, bulky(acknowledged))
    except LogWriteError as error:
        errors.append(str(error))
    retries: list[Callable[[], object]] = [lambda: append_now(opened, numbered(2)), opened.close]
    if limit_bytes is None:
        retries.append(lambda: reopened(log))  # there is no room for another segment
    for retry in retries:
        try:
            retry()
        except LogWriteError as error:
            errors.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))
    ballast.unlink(missing_ok=True)
    again = reopened(log)
    kept = again.scan.end.seq
    after = append_now(again, numbered(3))
    again.close()
    scan = scan_log(log)
    sys.stdout.buffer.write(
        msgspec.json.encode(
            {
                "acknowledged": acknowledged,
                "kept": kept,
                "after": after,
                "end": scan.end.seq,
                "read": sum(1 for _ in scan.events()),
                "errors": errors,
            }
        )
    )


def bulky(number: int) -> e.AttemptSuperseded:
    return e.AttemptSuperseded(
        group_id=number, generation=0, attempt=1, reason=Reason.TIMEOUT, detail="x" * 3000
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
