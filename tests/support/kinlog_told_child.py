"""A process that opens a log and appends the numbers that it is told, one a line. It prints what became of each."""

import sys
from pathlib import Path

from kinlog_builders import append_now, new_log, numbered, reopened

from kinlog.schemas.errors import LogWriteError


def main(directory: Path) -> None:
    opened = reopened(directory) if directory.exists() else new_log(directory)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        try:
            answer = str(append_now(opened, numbered(int(line))))
        except LogWriteError as error:
            answer = type(error).__name__
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
