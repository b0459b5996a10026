"""Questions in SQL to a log of 10 million events: seconds and memory of ``kinlog sql``, each in a process of its own.

The log is the one that the bench of reading makes. A process starts, verifies every byte that it reads, makes the columns
that the query names, and prints the answer.
"""

from collections.abc import Iterator
from pathlib import Path

from measure import Comparison, Setup, compare, run_bench
from reading import NUM_EVENTS, SMOKE_EVENTS, cost_of, write_log

QUERIES = {
    "attempts by reason": "select reason, count(*) from attempts group by all",
    "mean reward by step": (
        "select train_step, avg(shaped_reward) from step_groups join siblings using (group_id) "
        "where surviving group by all order by all"
    ),
    "events by kind": "select kind, count(*) from events group by all",
    "payloads of the checkpoints": "select payload->>'$.name' from events where kind = 'checkpoint_committed'",
}
AT_MOST_MB = 1024.0


def measured(log: Path, *, num_events: int, rounds: int) -> Iterator[Comparison]:
    for name, query in QUERIES.items():
        costs = [cost_of(["sql", str(log), query, "--csv"]) for _ in range(rounds)]
        case = f"{num_events:,} events: {name}"
        yield compare(
            f"{case}: time",
            "s",
            {"kinlog sql": [cost.seconds for cost in costs]},
            note=f"{min(cost.processor_s for cost in costs):.1f} s of processors' time: {query}",
        )
        yield compare(
            f"{case}: memory", "MB", {"kinlog sql": [cost.megabytes for cost in costs]}, at_most=AT_MOST_MB
        )


def measure_queries(setup: Setup) -> Iterator[Comparison]:
    num_events, rounds = (SMOKE_EVENTS, 1) if setup.smoke else (NUM_EVENTS, 3)
    log = setup.directory / "log"
    write_log(log, num_events)
    return measured(log, num_events=num_events, rounds=rounds)


if __name__ == "__main__":
    run_bench("sql", "Questions in SQL to a log of 10 million events", measure_queries)
