"""Planning a restart with many siblings alive: both partitions are compared with lineage row by row, what is lost and to
be put back is looked for, and everything is decided. All that a restart does between the listing and the plan.

A peer has published 0.59 s for 50,000 live siblings. That is their figure, from their machine: it is shown, not measured.
"""

import random
import time
from collections.abc import Sequence
from operator import itemgetter

import msgspec
from measure import Comparison, Setup, compare, run_bench
from msgspec.structs import replace
from simulated_run import dispatched_event, reserved_event, sealed_event

from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.replay.recovery.held_rows import HeldRows
from kinlog.replay.recovery.inventory import Inventory, expected_inventory, staged_rows
from kinlog.replay.recovery.journal import rows_to_put_back
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.replay.recovery.planning import plan_recovery
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import RowTag

SIBLINGS = 16
#: Groups that generate at a time: their rows lie among one another.
IN_FLIGHT = 64
AT_MOST_S = 0.1


def live_run(num_siblings: int, *, calls: int) -> Projection:
    """Return a projection of so many live siblings: of four groups, one is in the replay buffer, one waits for its
    finalize, and two are generating, with half of their siblings sealed."""
    p = Projection()

    def tell(event: e.Event) -> None:
        fold(p, e.RecordedEvent(p.last_seq + 1, 1, 0, event))

    for group_id in range(num_siblings // SIBLINGS):
        tell(reserved_event(group_id, SIBLINGS))
        tell(e.GroupAdmitted(group_id=group_id))
        for generation in range(SIBLINGS):
            tell(dispatched_event(group_id, generation, 1))
        for generation in range(SIBLINGS if group_id % 4 < 2 else SIBLINGS // 2):
            tell(sealed_event(group_id, generation, 1, calls=calls))
        if group_id % 4 == 0:
            tell(e.FinalizeStarted(group_id=group_id))
            rows = tuple(e.CanonicalRowRef(generation, 1, 700, bytes(16)) for generation in range(SIBLINGS))
            tell(e.GroupFinalized(group_id=group_id, rows=rows, valid_fraction=1.0))
    return p


def listing(p: Projection, *, calls: int) -> Inventory:
    """Return what a data plane answers: in the order of the puts, which is not that of the groups, and all of it made
    anew. Of each group one sibling's rows were put, and its result was never sealed: nobody refers to them."""
    expected = expected_inventory(p)
    chance = random.Random(0)
    puts: list[tuple[float, dict[str, RowTag]]] = []
    for group in p.live_groups():
        for generation, sibling in group.siblings.items():
            rows = staged_rows(group, sibling) if not group.rows else {}
            if sibling.running and generation == group.num_generations - 1:
                result = sealed_event(group.group_id, generation, sibling.attempt, calls=calls)
                rows = staged_rows(group, replace(sibling, running=False, sealed=result))
            puts.append((group.group_id + IN_FLIGHT * chance.random(), rows))
    staging = {key: tag for _, rows in sorted(puts, key=itemgetter(0)) for key, tag in rows.items()}
    answer = msgspec.msgpack.encode(Inventory(staging, expected.training))
    return msgspec.msgpack.decode(answer, type=Inventory)


def planning_s(p: Projection, inventory: Inventory) -> float:
    began = time.perf_counter()
    held = HeldRows(inventory)
    lost = rows_to_put_back(p, held)
    plan = plan_recovery(
        p, held, checkpoint="c", promised=e.Position(1, p.last_seq, 0), policy=RecoveryPolicy()
    )
    seconds = time.perf_counter() - began
    assert not lost
    assert plan.reused
    assert plan.superseded
    assert plan.unreferenced[Partition.STAGING]
    assert not plan.missing_promised
    return seconds


def measure_planning(setup: Setup) -> Sequence[Comparison]:
    num_siblings, rounds = (640, 2) if setup.smoke else (50_000, 15)
    comparisons = []
    for calls in (1, 2, 8):
        # As a restart has it: decoded from a snapshot.
        p = decode_projection(encode_projection(live_run(num_siblings, calls=calls)))
        inventory = listing(p, calls=calls)
        rows = len(inventory.staging) + len(inventory.training)
        costs = {"kinlog": [planning_s(p, inventory) for _ in range(rounds)]}
        comparisons.append(
            compare(
                f"{num_siblings:,} live siblings, {calls} calls each, {rows:,} rows in the data plane",
                "s",
                costs,
                at_most=AT_MOST_S,
                note="a peer has published 0.59 s for 50,000 live siblings, on their machine",
            )
        )
    return comparisons


if __name__ == "__main__":
    run_bench("planning", "Planning a restart", measure_planning)
