"""Event-loop lag with the log on and off: what a steady load of durable appends costs everything else on the loop.

A probe sleeps for a millisecond at a time and notes how much later it wakes. Meanwhile commits of 16 events are made at a
steady rate, each awaited by a task of its own. *Off*, the same events are made and the same tasks only wait a moment.
*Blocking* is what a log without a thread does: JSON Lines and ``fdatasync`` on the loop.

The figure is the 99th percentile of a round; the target is the difference between on and off.

    python bench/event_loop_lag.py [--smoke] [--json FILE] [--directory DIR]
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from measure import Comparison, Setup, compare, run_bench, take_turns
from simulated_run import dispatched_event

from kinlog.lineage.log import create_log
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import Event
from kinlog.schemas.settings import LogSettings

EVENTS_PER_COMMIT = 16
COMMITS_PER_S = 200
PROBE_S = 0.001
ADDED_MS_AT_MOST = 1.0

Commit = Callable[[Sequence[Event]], Coroutine[object, object, None]]


async def lag_p99_ms(commit: Commit, probes: int) -> float:
    """Return the 99th percentile of the probe's lag under a steady load of commits."""
    loop = asyncio.get_running_loop()
    load = asyncio.create_task(_steady_load(commit))
    lags_ms = []
    for _ in range(probes):
        due_s = loop.time() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lags_ms.append((loop.time() - due_s) * 1e3)
    load.cancel()
    await asyncio.wait([load])
    return statistics.quantiles(lags_ms, n=100, method="inclusive")[-1]


async def _steady_load(commit: Commit) -> None:
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    group_id = 0
    async with asyncio.TaskGroup() as tasks:
        while True:
            group_id += 1
            events = [dispatched_event(group_id, generation, 1) for generation in range(EVENTS_PER_COMMIT)]
            tasks.create_task(commit(events))
            due_s += 1 / COMMITS_PER_S
            await asyncio.sleep(max(0.0, due_s - loop.time()))


def with_the_log(directory: Path, probes: int) -> float:
    log = create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=LogSettings())

    async def commit(events: Sequence[Event]) -> None:
        rows = [encode_event(event) for event in events]
        await log.writer.append(rows, time.time_ns() // 1000).durable()

    try:
        return asyncio.run(lag_p99_ms(commit, probes))
    finally:
        log.close()


def without(probes: int) -> float:
    async def commit(events: Sequence[Event]) -> None:
        await asyncio.sleep(PROBE_S)

    return asyncio.run(lag_p99_ms(commit, probes))


def blocking(directory: Path, probes: int) -> float:
    directory.mkdir()
    encode = msgspec.json.Encoder().encode
    with open(directory / "log.jsonl", "ab", buffering=0) as file:

        async def commit(events: Sequence[Event]) -> None:
            file.write(b"".join([encode(event) + b"\n" for event in events]))
            os.fdatasync(file.fileno())

        return asyncio.run(lag_p99_ms(commit, probes))


def measure_lag(setup: Setup) -> Iterator[Comparison]:
    """Measure the lag with the log, without any, and with one that blocks the loop."""
    probes, rounds = (20, 2) if setup.smoke else (1000, 11)
    places = (setup.directory / str(number) for number in range(2 * rounds))
    costs = take_turns(
        {
            "log on": lambda: with_the_log(next(places), probes),
            "log off": partial(without, probes),
            "jsonl, blocking": lambda: blocking(next(places), probes),
        },
        rounds=rounds,
    )
    load = f"{COMMITS_PER_S} commits/s of {EVENTS_PER_COMMIT} events"
    yield compare(f"99th percentile of the lag, {load}", "ms", costs)
    added = [on - off for on, off in zip(costs["log on"], costs["log off"], strict=True)]
    yield compare("the same, added by the log", "ms", {"log on": added}, at_most=ADDED_MS_AT_MOST)


if __name__ == "__main__":
    run_bench("event_loop_lag", "Event-loop lag with the log on and off", measure_lag)
