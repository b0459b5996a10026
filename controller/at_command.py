"""``kinlog at``: the state of a run at any point of its history. It needs the base install only."""

from collections import Counter
from pathlib import Path

import click

from kinlog.controller.command_parameters import echo_json, json_option, run_argument, time_value
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.replay.at import Moment, find_seq, find_step, find_time, project_at
from kinlog.replay.inspection import locate_run
from kinlog.replay.plain_text import format_time, render_counts, render_sections, render_table

__all__ = ["at_command"]


@click.command("at")
@run_argument()
@click.option("--seq", type=click.IntRange(min=1), help="Just after this event.")
@click.option("--step", type=click.IntRange(min=1), help="Just after this optimizer step was applied.")
@click.option("--time", "time_us", metavar="TIME", callback=time_value, help="At this time: ISO 8601, UTC.")
@click.option("--groups", is_flag=True, help="Also list the groups that were not forgotten.")
@json_option()
def at_command(
    run: Path, seq: int | None, step: int | None, time_us: int | None, groups: bool, as_json: bool
) -> None:
    """Show the state of a run at one point of its history: just after an event, a step, or at a time.

    Of a step that was applied several times, the one that stands is meant. At a time, the newest event counts that was
    recorded then or before, and all events before it: order is by seq, since clocks may go backwards.

    It is made from the nearest checkpoint before that point, if there is one, and the events since.

    --json prints {"at": ..., "from_checkpoint": ..., "projection": ...}. The projection is all that a restart would go on
    from: its fields, and those of its groups and siblings, are documented in kinlog.lineage.state.

    \b
    Exit codes
       0  shown
      27  there is no such point in the log, or not any more

    \b
    Example
      kinlog at runs/first --step 7
      kinlog at runs/first --seq 1200 --groups
      kinlog at runs/first --time 2026-01-31T22:00:00 --json | jq .projection.draw_cursor
    """
    if [seq, step, time_us].count(None) != 2:
        raise click.UsageError("say one of --seq, --step and --time")
    directory = locate_run(run)
    scan = scan_log(directory.log)
    if seq is not None:
        moment = find_seq(scan, seq)
    elif step is not None:
        moment = find_step(scan, step)
    else:
        assert time_us is not None
        moment = find_time(scan, time_us)
    projection, checkpoint = project_at(directory, scan, moment.seq)
    if as_json:
        echo_json({"at": moment, "from_checkpoint": checkpoint, "projection": projection})
        return
    click.echo(_render(moment, projection))
    if groups:
        click.echo(f"\n{_render_groups(projection)}")


def _render(moment: Moment, p: Projection) -> str:
    alive = Counter(group.phase for group in p.live_groups())
    siblings = [sibling for group in p.live_groups() for sibling in group.siblings.values()]
    sealed = sum(sibling.sealed is not None for sibling in siblings)
    running = sum(sibling.running for sibling in siblings)
    parked = Counter(
        g.parked_reason.value for g in p.groups.values() if g.phase is GroupPhase.PARKED and g.parked_reason
    )
    exhausted = ", the dataset is exhausted" if p.exhausted else ""
    sections = [
        [
            ("steps applied", f"{p.train_step:,}"),
            ("  not undone any more", f"up to step {p.frontier_step:,}"),
            ("weight version", f"{p.weight_version:,}"),
            ("draws", f"{p.draw_cursor:,}{exhausted}"),
            ("restarts", f"{p.restarts:,}"),
        ],
        [
            ("groups drawn", f"{p.drawn_total:,}"),
            ("  = applied", f"{p.applied_total:,}"),
            ("  + dropped", render_counts({reason.value: n for reason, n in p.dropped.items()})),
            ("  + parked", render_counts(parked)),
            ("  + alive", f"{p.alive_total:,}"),
            *((f"    {phase.value}", f"{alive[phase]:,}") for phase in GroupPhase if alive[phase]),
        ],
        [
            ("siblings of live groups", f"{len(siblings):,}"),
            ("  sealed", f"{sealed:,}"),
            ("  in flight", f"{running:,}"),
            ("  to be dispatched", f"{len(siblings) - sealed - running:,}"),
        ],
        [
            ("attempts sealed so far", f"{p.sealed_total:,}, {p.sealed_tokens_total:,} tokens"),
            ("  superseded", render_counts({reason.value: n for reason, n in p.superseded.items()})),
            ("  rejected as late", f"{p.late_rejected:,}"),
        ],
        [
            ("checkpoints", ", ".join(checkpoint.name for checkpoint in p.checkpoints) or "none"),
        ],
    ]
    title = f"run {p.run_id} at seq {moment.seq:,} of life {moment.epoch}, {format_time(moment.time_us)}"
    note = f"\n  note: {moment.note}" if moment.note else ""
    return f"{title}{note}\n\n{render_sections(sections, indent=2)}"


def _render_groups(p: Projection) -> str:
    titles = (
        "group",
        "phase",
        "sample",
        "task",
        "granularity",
        "sealed",
        "in flight",
        "of",
        "weights",
        "step",
    )
    rows = [_group_row(group) for _, group in sorted(p.groups.items())]
    return render_table(titles, rows, right=(0, 5, 6, 7, 8, 9), indent=2) if rows else "  no groups"


def _group_row(group: GroupState) -> tuple[str, ...]:
    siblings = group.siblings.values()
    step = group.claimed_step if group.claimed_step is not None else group.train_step
    return (
        str(group.group_id),
        group.phase.value + (f": {group.parked_reason.value}" if group.parked_reason is not None else ""),
        group.prompt.sample_id,
        group.prompt.task_name,
        group.granularity.value,
        str(sum(sibling.sealed is not None for sibling in siblings)),
        str(sum(sibling.running for sibling in siblings)),
        str(group.num_generations),
        str(group.min_weight_version),
        "-" if step is None else str(step),
    )
