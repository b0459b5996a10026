"""Planning a restart with many siblings alive: the inventory of both partitions is compared row by row, and everything is
decided.

A peer has published 0.59 s for 50,000 live siblings. That is their figure, from their machine: it is shown, not measured.
"""

import time
from collections.abc import Sequence

from measure import Comparison, Setup, compare, run_bench
from simulated_run import dispatched_event, reserved_event, sealed_event

from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection
from kinlog.replay.inventory import Inventory, expected_inventory
from kinlog.replay.plan import RecoveryPolicy, plan_recovery
from kinlog.schemas import events as e

SIBLINGS = 16
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


def planning_s(p: Projection, inventory: Inventory) -> float:
    began = time.perf_counter()
    plan = plan_recovery(
        p, inventory, checkpoint="c", promised=e.Position(1, p.last_seq, 0), policy=RecoveryPolicy()
    )
    seconds = time.perf_counter() - began
    assert plan.reused
    assert plan.superseded
    assert not plan.missing_promised
    return seconds


def measure_planning(setup: Setup) -> Sequence[Comparison]:
    num_siblings, rounds = (640, 2) if setup.smoke else (50_000, 15)
    comparisons = []
    for calls in (1, 2, 8):
        p = live_run(num_siblings, calls=calls)
        # Made anew, as a data plane answers: none of its objects is one of the projection's.
        inventory = expected_inventory(p)
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
