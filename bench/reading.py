"""Reading a long log: seconds and memory of the commands that people wait for, on a log of 10 million events.

Questions in SQL are among them: their process also makes the columns that a query names, out of the history.

The log is that of a simulated run, compacted as a controller would have, its newest events in small frames as they were
written. Each command is the real one, in a process of its own: its start, the verifying of every byte that it reads, and
the printing are in its seconds; its memory is the most that the process ever took.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from measure import Comparison, Setup, compare, run_bench
from simulated_run import RunShape, history

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.log import create_log
from kinlog.lineage.store import LocalStore
from kinlog.schemas.codec import encode_event
from kinlog.schemas.settings import LogSettings

NUM_EVENTS, SMOKE_EVENTS = 10_000_000, 20_000
SHAPE = RunShape(siblings=8, calls=2, in_flight=64, groups_per_step=32, steps_per_checkpoint=8)
#: Events to a frame while the log is made in a hurry, and those of its newest hundredth, as a controller writes them.
LARGE_FRAME, SMALL_FRAME = 1024, 16
COMPACTED_EVERY = 1_000_000
TIME_US, US_PER_EVENT = 1_700_000_000_000_000, 40
AT_MOST_S, AT_MOST_MB, AT_MOST_MB_IN_SQL = 10.0, 512.0, 1024.0
QUERIES = {
    "attempts by reason": "select reason, count(*) from attempts group by all",
    "mean reward by step": (
        "select train_step, avg(shaped_reward) from step_groups join siblings using (group_id) "
        "where surviving group by all order by all"
    ),
    "events by kind": "select kind, count(*) from events group by all",
    "payloads of the checkpoints": "select payload->>'$.name' from events where kind = 'checkpoint_committed'",
}


def write_log(directory: Path, num_events: int) -> None:
    """Write and compact the log of a simulated run. It is not synced: it is read at once, and gone after."""
    settings = LogSettings(durability="os", segment_bytes=64 * 1024 * 1024)
    log = create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=settings)
    events, written, compacted = history(num_events, SHAPE), 0, 0
    while frame := list(islice(events, LARGE_FRAME if written < num_events * 0.99 else SMALL_FRAME)):
        ticket = log.writer.append([encode_event(event) for event in frame], TIME_US + US_PER_EVENT * written)
        written += len(frame)
        if written - compacted >= min(COMPACTED_EVERY, num_events // 2):
            ticket.wait()
            compact_log(LocalStore(), directory, epoch=log.writer.epoch, checkpoints=())
            compacted = written
    log.close()


class Cost(NamedTuple):
    """What one run of a command took."""

    seconds: float
    processor_s: float
    megabytes: float


#: A process is charged with the memory of the one that it was forked from: this one is small.
_LAUNCHER = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
seconds = time.perf_counter() - began
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss]))
"""


def cost_of(arguments: Sequence[str]) -> Cost:
    """Run a kinlog command in a process of its own."""
    command = [sys.executable, "-m", "kinlog.controller", *arguments]
    launched = subprocess.run([sys.executable, "-c", _LAUNCHER, *command], stdout=subprocess.PIPE, check=True)
    status, seconds, processor_s, max_rss = json.loads(launched.stdout)
    if status:
        raise RuntimeError(f"kinlog {' '.join(arguments)} ended with {status}")
    # Linux counts in KiB, macOS in bytes.
    return Cost(seconds, processor_s, max_rss / (1024 if sys.platform == "linux" else 1024 * 1024))


def commands(run: str, num_events: int) -> dict[str, list[str]]:
    """Return the commands, each asking for something in the middle of the log, where nothing is near an end."""
    # A group takes about 22 events, and a step 32 groups.
    group, step, seq = num_events // 44, num_events // 1500, num_events // 2
    return {
        "log stats": ["log", "stats", run],
        "why": ["why", run, str(group)],
        "examples": ["examples", run, "--step", str(step)],
        "at --seq": ["at", run, "--seq", str(seq)],
        "at --step": ["at", run, "--step", str(step)],
        "log show --group": ["log", "show", run, "--group", str(group)],
        **{f"sql, {name}": ["sql", run, query, "--csv"] for name, query in QUERIES.items()},
    }


def measure_reading(setup: Setup) -> Iterator[Comparison]:
    num_events, rounds = (SMOKE_EVENTS, 1) if setup.smoke else (NUM_EVENTS, 3)
    log = setup.directory / "log"
    write_log(log, num_events)
    size_mb = sum(path.stat().st_size for path in log.iterdir()) / 1e6
    for name, arguments in commands(str(log), num_events).items():
        costs = [cost_of(arguments) for _ in range(rounds)]
        case = f"kinlog {name}, {num_events:,} events"
        yield compare(
            f"{case}: time",
            "s",
            {"kinlog": [cost.seconds for cost in costs]},
            at_most=AT_MOST_S,
            note=f"{min(cost.processor_s for cost in costs):.1f} s of them a processor's; the log has {size_mb:,.0f} MB",
        )
        yield compare(
            f"{case}: memory",
            "MB",
            {"kinlog": [cost.megabytes for cost in costs]},
            at_most=AT_MOST_MB_IN_SQL if arguments[0] == "sql" else AT_MOST_MB,
        )


if __name__ == "__main__":
    run_bench("reading", "Reading a log of 10 million events", measure_reading)
