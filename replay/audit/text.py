"""The audit as text for a terminal."""

from collections.abc import Mapping, Sequence

from kinlog.replay.audit.account import GivenUp, RestartAccount
from kinlog.replay.audit.audit import Audit, RewardWindow
from kinlog.replay.plain_text import (
    format_count,
    format_time,
    render_counts,
    render_paragraph,
    render_sections,
    render_table,
    some,
)

__all__ = ["render_audit"]


def render_audit(audit: Audit, *, listed: bool = False) -> str:
    """Return the audit as text.

    Parameters
    ----------
    listed:
        Also list everything redone or dropped, one by one.
    """
    text = render_sections(
        [
            _conservation(audit),
            _draws(audit),
            _training(audit),
            _siblings(audit),
            _lengths(audit),
            _rewards(audit),
        ],
        indent=2,
    )
    title = f"audit of run {audit.run_id}, {audit.events:,} events, {_lives(audit.lives)}"
    verdict = (
        "HOLDS: nothing lost, nothing trained on twice, a reason for everything redone, no length bias found"
        if audit.holds
        else "DOES NOT HOLD: " + "; ".join(audit.failures)
    )
    sections = [title, *_dropped_history(audit), text, *_restarts(audit.restarts)]
    if listed:
        sections.append(_list(audit.given_up))
    return "\n\n".join([*sections, verdict])


def _dropped_history(audit: Audit) -> list[str]:
    if not audit.dropped_events:
        return []
    return [
        render_paragraph(
            f"The first {format_count(audit.dropped_events, 'event')} were dropped, and only what they amounted to is "
            "left: that is taken as it is. What was redone, restarts and rewards are counted after them.",
            first="  ",
            rest="  ",
        )
    ]


def _lives(lives: int) -> str:
    return format_count(lives, "life", "lives")


def _conservation(audit: Audit) -> list[tuple[str, str]]:
    lines = [
        ("groups drawn", f"{audit.drawn:,}"),
        ("  = applied", f"{audit.applied:,}"),
        ("  + dropped", _total(audit.dropped)),
        ("  + parked", _total(audit.parked)),
        ("  + alive", "unknown" if audit.alive is None else f"{audit.alive:,}"),
    ]
    if audit.unaccounted:
        lines.append(("  unaccounted for", f"{len(audit.unaccounted):,}: {some(audit.unaccounted)}"))
    if audit.counted_twice:
        lines.append(("  in two of these", f"{len(audit.counted_twice):,}: {some(audit.counted_twice)}"))
    return lines


def _draws(audit: Audit) -> list[tuple[str, str]]:
    return [
        ("prompts drawn", f"{audit.draw_cursor:,}"),
        ("  lost", _number_of(audit.draws_missing)),
        ("  drawn twice", _number_of(audit.draws_repeated)),
    ]


def _training(audit: Audit) -> list[tuple[str, str]]:
    undone = f"; {audit.steps_rolled_back:,} more undone by restarts" if audit.steps_rolled_back else ""
    return [
        ("optimizer steps", f"{audit.steps:,}{undone}"),
        ("  applied twice", _number_of(audit.applied_twice)),
    ]


def _siblings(audit: Audit) -> list[tuple[str, str]]:
    return [
        ("siblings sealed", f"{audit.sealed:,}"),
        ("  redone", _total(audit.sealed_redone)),
        ("attempts redone", _total(audit.given_up_by_reason(dropped=False))),
        ("  without a reason", _number_of(audit.redispatched_without_reason)),
        ("siblings dropped", _total(audit.given_up_by_reason(dropped=True))),
        ("late results rejected", f"{audit.late_rejected:,}"),
    ]


def _lengths(audit: Audit) -> list[tuple[str, str]]:
    bias = audit.length_bias
    return [
        ("length of groups", "completion tokens, mean over siblings"),
        ("  left untrained", _median(bias.lost, bias.median_lost)),
        ("  trained on", _median(bias.trained, bias.median_trained)),
        ("  left is longer", bias.statistic),
        ("  of unknown length", _unknown(bias.unknown)),
    ]


def _unknown(siblings: int) -> str:
    return f"{format_count(siblings, 'sibling')} left, begun and never sealed" if siblings else "0"


def _median(groups: int, median: float | None) -> str:
    of = format_count(groups, "group")
    return of if median is None else f"median {median:,.1f} of {of}"


def _list(given_up: Sequence[GivenUp]) -> str:
    if not given_up:
        return "  nothing was redone, and nothing left untrained"
    rows = [
        (
            f"{g.seq:,}",
            str(g.group_id),
            str(g.generation),
            str(g.attempt),
            "dropped" if g.with_group else "redone",
            "sealed" if g.was_sealed else "",
            g.reason.value,
        )
        for g in given_up
    ]
    titles = ("seq", "group", "generation", "attempt", "what", "was", "reason")
    return render_table(titles, rows, right=(0, 1, 2, 3), indent=2)


def _rewards(audit: Audit) -> list[tuple[str, str]]:
    if audit.first_rewards is None or audit.last_rewards is None:
        return [("mean reward", "no step was applied")]
    return [
        ("mean reward", "raw (shaped)"),
        *(
            (f"  {_step_range(window)}", _mean(window))
            for window in dict.fromkeys((audit.first_rewards, audit.last_rewards))
        ),
    ]


def _step_range(window: RewardWindow) -> str:
    if window.first_step == window.last_step:
        return f"step {window.first_step}"
    return f"steps {window.first_step} to {window.last_step}"


def _mean(window: RewardWindow) -> str:
    if window.mean_raw_reward is None or window.mean_shaped_reward is None:
        return "no valid sibling"
    return (
        f"{window.mean_raw_reward:.4f} ({window.mean_shaped_reward:.4f}) "
        f"over {format_count(window.siblings, 'sibling')} of {format_count(window.groups, 'group')}"
    )


def _restarts(restarts: Sequence[RestartAccount]) -> list[str]:
    if not restarts:
        return ["  no restart"]
    rows = [
        (
            str(r.epoch),
            format_time(r.began_us),
            _came_from(r),
            f"{r.sealed_before:,}",
            f"{r.reused:,}",
            f"{sum(r.regenerated.values()):,}",
            f"{sum(r.left_with_group.values()):,}",
            f"{sum(r.in_flight_redispatched.values()):,}",
        )
        for r in restarts
    ]
    titles = ("life", "restarted", "from", "sealed", "reused", "redone", "dropped", "in flight")
    table = render_table(titles, rows, right=(0, 3, 4, 5, 6, 7), indent=2)
    return [
        render_paragraph(
            f"{format_count(len(restarts), 'restart')}: of the sealed siblings that each found, how many it reused, "
            "redid, or dropped with their group; and how many attempts in flight it gave up, to redo them",
            first="  ",
            rest="  ",
        )
        + "\n\n"
        + table
    ]


def _came_from(restart: RestartAccount) -> str:
    if not restart.restored:
        return "never restored"
    return restart.checkpoint or "the start"


def _total(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{total:,} ({render_counts(counts)})" if total else "0"


def _number_of(ids: Sequence[object]) -> str:
    return f"{len(ids):,}: {some(ids)}" if ids else "0"
