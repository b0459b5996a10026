"""The exclusive hold of a checkpoint, lineage part: for how long nothing may change.

kinlog makes what was appended durable and notes its place in the log. The snapshot is folded from the log afterwards, while
the run goes on: what bounds the hold is the disk, shown as one sync of the same bytes. Beside it stands a full-state ledger that copies and dumps all live groups: see ``full_state_ledger``. A
peer has published 1.1 s at 64 live groups, 2.2 s at 128 and 5.8 s at 256: their figures, from their machine, shown and
not measured.

The second part is what the snapshot costs those who go on meanwhile: how late an event loop wakes up while another
thread folds, encodes and compresses it.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from full_state_ledger import FullStateLedger
from measure import Comparison, Setup, compare, run_bench, spread_of, take_turns
from simulated_run import dispatched_event, reserved_event, sealed_event

from kinlog.lineage.fold import fold
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.log import create_log
from kinlog.lineage.state import Projection
from kinlog.replay.projection import write_snapshot_bytes
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.reasons import Reason
from kinlog.schemas.settings import LogSettings

SIBLINGS = 16
CALLS = 64
#: Results that arrived just before the hold, and are not durable yet.
APPENDS_IN_FLIGHT = 16
HOLDS_PER_ROUND = 5
AT_MOST_MS = 5.0
#: Above this the stand-in takes minutes, and many GiB.
LARGEST_FULL_STATE = 256
PUBLISHED_S = {64: 1.1, 128: 2.2, 256: 5.8}


class FreeCut:
    def require(self) -> None:
        return


def live_projection(num_groups: int) -> Projection:
    """Return a projection of so many live groups, all of whose siblings but one each are sealed."""
    p = Projection()

    def tell(event: e.Event) -> None:
        fold(p, e.RecordedEvent(p.last_seq + 1, 1, 0, event))

    for group_id in range(num_groups):
        tell(reserved_event(group_id, SIBLINGS))
        tell(e.GroupAdmitted(group_id=group_id))
        for generation in range(SIBLINGS):
            tell(dispatched_event(group_id, generation, 1))
        for generation in range(SIBLINGS - 1):
            tell(sealed_event(group_id, generation, 1, calls=CALLS))
    return p


def full_state(num_groups: int) -> FullStateLedger:
    ledger = FullStateLedger()
    for group_id in range(num_groups):
        for generation in range(SIBLINGS):
            ledger.seal(group_id, generation, calls=CALLS)
    return ledger


def result_again(ledger: Ledger, group_id: int) -> None:
    """Record that a sibling is given up, sent again and sealed: the state stays as large as it is."""
    attempt = ledger.projection.groups[group_id].siblings[0].attempt
    ledger.commit(
        FreeCut(),
        e.AttemptSuperseded(group_id=group_id, generation=0, attempt=attempt, reason=Reason.WORKER_LOST),
        dispatched_event(group_id, 0, attempt + 1),
        sealed_event(group_id, 0, attempt + 1, calls=CALLS),
    )


async def hold_ms(ledger: Ledger) -> float:
    for number in range(APPENDS_IN_FLIGHT):
        result_again(ledger, number % len(ledger.projection.groups))
    began = time.perf_counter()
    await ledger.position()
    return (time.perf_counter() - began) * 1000


class PlainFile:
    """What bounds a hold: as many bytes as its appends have, in one write and one sync."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - open as long as the bench
        payload = encode_event(sealed_event(0, 0, 1, calls=CALLS)).payload
        self._content = payload * APPENDS_IN_FLIGHT
        self._file.write(bytes(len(self._content)))
        os.fsync(self._file.fileno())

    def write_ms(self) -> float:
        began = time.perf_counter()
        os.pwrite(self._file.fileno(), self._content, 0)
        os.fdatasync(self._file.fileno())
        return (time.perf_counter() - began) * 1000


def full_state_ms(ledger: FullStateLedger, path: Path) -> float:
    gc.collect()
    began = time.perf_counter()
    ledger.checkpoint(path)
    return (time.perf_counter() - began) * 1000


async def lag_while_ms(work: Callable[[], object]) -> float:
    """Return by how much a wake-up of this event loop was late, at worst, while ``work`` ran in another thread."""
    pause_s = 0.001
    working = asyncio.create_task(asyncio.to_thread(work))
    worst_s = 0.0
    while not working.done():
        began = time.perf_counter()
        await asyncio.sleep(pause_s)
        worst_s = max(worst_s, time.perf_counter() - began - pause_s)
    await working
    return worst_s * 1000


def measure_hold(setup: Setup) -> Sequence[Comparison]:
    sizes, rounds = ((2, 4), 2) if setup.smoke else ((64, 128, 256, 1024, 4096), 5)
    comparisons: list[Comparison] = []
    lags: list[Comparison] = []
    plain = PlainFile(setup.directory / "plain")
    for num_groups in sizes:
        p = live_projection(num_groups)
        log = create_log(
            setup.directory / f"log-{num_groups}",
            log_id="l",
            run_id="r",
            writer_version="bench",
            settings=LogSettings(),
        )
        p.last_seq = log.writer.last_seq  # as if the log held it
        ledger = Ledger(p, log.writer, lambda: time.time_ns() // 1000)

        def holds(ledger: Ledger = ledger) -> float:
            return spread_of([asyncio.run(hold_ms(ledger)) for _ in range(HOLDS_PER_ROUND)]).median

        def plain_writes(file: PlainFile = plain) -> float:
            return spread_of([file.write_ms() for _ in range(HOLDS_PER_ROUND)]).median

        contenders: dict[str, Callable[[], float]] = {
            "kinlog": holds,
            "the same bytes, one sync": plain_writes,
        }
        if num_groups <= LARGEST_FULL_STATE:
            theirs, path = full_state(num_groups), setup.directory / "full-state.pt"
            contenders["full-state stand-in"] = lambda theirs=theirs, path=path: full_state_ms(theirs, path)
        costs = take_turns(contenders, rounds=rounds)
        published = PUBLISHED_S.get(num_groups)
        case = f"{num_groups:,} live groups x {SIBLINGS} siblings x {CALLS} calls"
        comparisons.append(
            compare(
                f"hold, {case}, {APPENDS_IN_FLIGHT} appends in flight",
                "ms",
                costs,
                at_most=AT_MOST_MS,
                note="" if published is None else f"a peer has published {published} s, on their machine",
            )
        )
        waited = [asyncio.run(lag_while_ms(lambda p=p: write_snapshot_bytes(p))) for _ in range(rounds)]
        lags.append(compare(f"event-loop lag while the snapshot is made, {case}", "ms", {"kinlog": waited}))
        log.close()
    return comparisons + lags


if __name__ == "__main__":
    run_bench("checkpoint_hold", "The exclusive hold of a checkpoint, lineage part", measure_hold)
