"""A process that opens a log, appends numbered events, and prints each seq once it is acknowledged. It is to be killed."""

import sys
from pathlib import Path

from kinlog_builders import append_now, new_log, numbered, reopened


def main(directory: Path) -> None:
    opened = reopened(directory) if directory.exists() else new_log(directory)
    sys.stdout.write("ready\n")
    while True:
        size = 1 + opened.writer.last_seq % 5
        first = opened.writer.last_seq + 1
        last = append_now(opened, *(numbered(first + place) for place in range(size)))
        sys.stdout.write(f"{last}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
