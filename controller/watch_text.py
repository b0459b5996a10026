"""A glance at a run as text, for ``kinlog watch``."""

from collections.abc import Mapping

from kinlog.lineage.state import GroupPhase
from kinlog.replay.plain_text import (
    format_count,
    format_duration,
    render_counts,
    render_sections,
)
from kinlog.replay.watch.kill_cost import KillCost
from kinlog.replay.watch.summary import LastCheckpoint, RunState, RunView

__all__ = ["render_view"]

_BAR_CELLS = 30


def render_view(v: RunView) -> str:
    """Return what is shown of a run."""
    process = f"pid {v.pid} on {v.host}" if v.host else "an unknown process"
    quiet = format_duration(v.log_lag.newest_event_age_s)
    states = {
        RunState.RUNNING: f"running, {process}",
        RunState.DIED: f"DIED: {process} is gone, without an end in the log; last news {quiet} ago. Resume it",
        RunState.STOPPED: f"closed in order {quiet} ago: resume it to go on",
        RunState.DONE: f"done, and closed in order {quiet} ago",
    }
    restarts = format_count(v.restarts, "restart") if v.restarts else "no restarts"
    run = [
        ("run", f"{v.run_id}: {states[v.state]}"),
        (
            "life",
            f"{v.life}, {'for' if v.state is RunState.RUNNING else 'of'} {format_duration(v.life_s)}; {restarts}",
        ),
        ("step", _progress(v)),
    ]
    permits = f" of {v.max_live_groups} permits" if v.max_live_groups is not None else ""
    groups = [
        ("groups", f"{v.live_groups} live{permits}: {_phases(v.groups)}"),
        (
            "",
            f"{v.drawn:,} drawn, {v.applied:,} applied, {v.parked:,} parked; dropped: {render_counts(v.dropped)}",
        ),
        (
            "siblings",
            f"{v.siblings_in_flight} in flight, {v.siblings_waiting} waiting, {v.siblings_sealed} sealed, of live groups",
        ),
        ("oldest", _oldest(v)),
        ("given up", f"{render_counts(v.superseded)}, in the whole run"),
    ]
    flow = [
        (
            "tokens",
            f"{v.tokens_per_second:,.0f} a second over {'the' if v.state is RunState.RUNNING else 'its'} last minute; "
            f"{v.sealed_tokens:,} sealed in the whole run",
        ),
        ("staleness", _staleness(v)),
        ("log", _log(v)),
        ("checkpoint", _checkpoint(v.checkpoint, v)),
    ]
    sections = [run, groups, flow]
    if v.state is not RunState.DONE:
        sections.append(_kill(v.kill, v.row_journal, v.state))
    return render_sections(sections)


def _progress(v: RunView) -> str:
    weights = f"; weights {v.weight_version}"
    if v.max_steps is None:
        return f"{v.train_step}{weights}"
    part = min(1.0, v.train_step / v.max_steps)
    filled = round(_BAR_CELLS * part)
    text = (
        f"{v.train_step} of {v.max_steps}  [{'#' * filled}{'-' * (_BAR_CELLS - filled)}] {part:.0%}{weights}"
    )
    if v.seconds_per_step is not None:
        text += f"; {format_duration(v.seconds_per_step)} a step"
    if v.eta_s is not None:
        text += f", ETA {format_duration(v.eta_s)}"
    return text


def _phases(groups: Mapping[str, int]) -> str:
    return ", ".join(f"{groups[phase]} {phase.value}" for phase in GroupPhase if phase in groups) or "none"


def _oldest(v: RunView) -> str:
    if v.oldest is None:
        return "none in flight"
    o = v.oldest
    return f"group {o.group_id}/{o.generation} attempt {o.attempt}, in flight for {format_duration(o.age_s)} on {o.worker}"


def _staleness(v: RunView) -> str:
    if v.staleness is None:
        return "no live group"
    s = v.staleness
    return f"{s.min} to {s.max} versions behind, {s.mean:.1f} on average, over live groups"


def _log(v: RunView) -> str:
    lag = v.log_lag
    age = format_duration(lag.newest_event_age_s)
    if not lag.unproven_events:
        return f"seq {lag.last_seq:,}, {age} old; all of it durable"
    return (
        f"seq {lag.last_seq:,}, {age} old; durable to seq {lag.durable_seq:,} by its own mark, "
        f"{format_count(lag.unproven_events, 'event')} appended since"
    )


def _checkpoint(checkpoint: LastCheckpoint | None, v: RunView) -> str:
    failed = v.checkpoints_failed
    failures = f"; {format_count(failed, 'checkpoint')} FAILED since" if failed else ""
    if checkpoint is None:
        return f"none yet{failures}"
    cost = ""
    if checkpoint.duration_s is not None:
        cost = f", took {checkpoint.duration_s:.2f} s"
        if checkpoint.held_s is not None:
            cost += f", of which everything was held for {1000 * checkpoint.held_s:.0f} ms"
    age = "old" if v.state is RunState.RUNNING else "before the last event"
    return f"{checkpoint.name}, {format_duration(checkpoint.age_s)} {age}{cost}{failures}"


def _kill(kill: KillCost, row_journal: bool | None, state: RunState) -> list[tuple[str, str]]:
    flying = format_count(kill.siblings_in_flight, "sibling")
    back = f"{format_count(kill.steps_rolled_back, 'step')} rolled back"
    redone = (
        f"{format_count(kill.siblings_redone_without_journal, 'sealed sibling')} and "
        f"{format_count(kill.tokens_redone_without_journal, 'token')} generated again"
    )
    with_journal, without = f"{back}, nothing sealed is generated again", f"{back}, {redone}"
    on, off = {True: (" (on)", ""), False: ("", " (off)"), None: ("", "")}[row_journal]
    when = "a kill now" if state is RunState.RUNNING else "a restart"
    in_flight = f"{flying} in flight, {format_duration(kill.seconds_in_flight)} of generation, cut off"
    return [
        (when, f"goes back to {kill.checkpoint or 'the start of the run'}; {in_flight}"),
        (f"with journal{on}", with_journal),
        (f"without{off}", without),
    ]
