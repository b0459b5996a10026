"""The commands that read a run: ``kinlog log ls|stats|show|verify``, ``kinlog plan`` and ``kinlog proof``.

They need the base install only, take no lock and change nothing.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from kinlog.controller.inspection_text import (
    render_segments,
    render_statistics,
    render_verification,
)
from kinlog.controller.samplers import build_sampler
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import GroupState, Projection
from kinlog.replay.inspection import list_segments, locate_run
from kinlog.replay.offline_plan import plan_offline
from kinlog.replay.plan import RecoveryPolicy
from kinlog.replay.proof import prove, render_proof
from kinlog.replay.rendering import LINE_COLUMNS, JsonValue, event_line, event_object, to_json_value
from kinlog.replay.report import render_redone, render_report
from kinlog.replay.selection import EventFilter, select_events
from kinlog.replay.statistics import collect_statistics
from kinlog.replay.verify import verify_everything
from kinlog.schemas.config import RunConfig, load_config
from kinlog.schemas.errors import CheckpointError, LogDamagedError, TransitionError
from kinlog.schemas.events import EVENT_TYPES
from kinlog.schemas.reasons import Reason

__all__ = ["log_commands", "plan_command", "proof_command"]

_run = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def _echo_json(value: JsonValue) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


@click.group("log")
def log_commands() -> None:
    """Read a run's log: its segments, numbers, events, soundness."""


@log_commands.command("ls")
@_run
@_json
def ls_command(run: Path, as_json: bool) -> None:
    """List the segments of a log, after verifying them.

    \b
    A segment is
      closed    ended in order
      live      the newest: being written, or left by a kill
      unclosed  left by a kill; a newer life went on after it
      torn      its last write was cut short; the next life keeps that aside
      fenced    holds what an older life wrote past a take-over: not history
      empty     claimed by a life that never began

    \b
    Example
      kinlog log ls runs/first
    """
    scan = scan_log(locate_run(run).log)
    segments = list_segments(scan)
    if as_json:
        _echo_json(
            {
                "log": str(scan.directory),
                "run_id": scan.run_id,
                "log_id": scan.log_id,
                "segments": to_json_value(segments),
            }
        )
    else:
        click.echo(f"log of run {scan.run_id}: {scan.directory}\n\n{render_segments(segments)}")


@log_commands.command("stats")
@_run
@_json
def stats_command(run: Path, as_json: bool) -> None:
    """Count what a log holds: groups, siblings, tokens, steps, checkpoints, restarts.

    \b
    Example
      kinlog log stats runs/first
      kinlog log stats runs/first --json | jq .siblings.superseded
    """
    statistics = collect_statistics(scan_log(locate_run(run).log))
    if as_json:
        _echo_json(to_json_value(statistics))
    else:
        click.echo(render_statistics(statistics))


@log_commands.command("show")
@_run
@click.option("--group", "group_id", type=click.IntRange(min=0), help="Only this group, with its steps.")
@click.option("--generation", type=click.IntRange(min=0), help="Only this sibling of a group.")
@click.option("--step", "train_step", type=click.IntRange(min=0), help="Only this optimizer step.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only this kind, such as sibling_sealed. Repeatable.",
)
@click.option(
    "--reason",
    "reasons",
    multiple=True,
    metavar="REASON",
    help="Only this reason, such as timeout. Repeatable.",
)
@click.option("--epoch", type=click.IntRange(min=1), help="Only this life of the run.")
@click.option("--from", "first_seq", type=click.IntRange(min=1), default=1, help="From this seq on.")
@click.option("--to", "last_seq", type=click.IntRange(min=1), help="Up to this seq, included.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with every field.")
def show_command(
    run: Path,
    group_id: int | None,
    generation: int | None,
    train_step: int | None,
    kinds: tuple[str, ...],
    reasons: tuple[str, ...],
    epoch: int | None,
    first_seq: int,
    last_seq: int | None,
    as_json: bool,
) -> None:
    """Show events, oldest first. An event is shown if it fits every option.

    Text is cut at the edge of a terminal, and abbreviates long fields; --json has everything.

    \b
    Example
      kinlog log show runs/first --group 17
      kinlog log show runs/first --kind attempt_superseded --reason timeout
      kinlog log show runs/first --epoch 2 --json | head
    """
    _refuse_unknown("--kind", kinds, tuple(EVENT_TYPES))
    _refuse_unknown("--reason", reasons, tuple(reason.value for reason in Reason))
    selection = EventFilter(
        kinds=frozenset(kinds),
        group_id=group_id,
        generation=generation,
        train_step=train_step,
        reasons=frozenset(Reason(reason) for reason in reasons),
        epoch=epoch,
        first_seq=first_seq,
        last_seq=last_seq,
    )
    scan = scan_log(locate_run(run).log)
    if as_json:
        for record in select_events(scan, selection):
            click.echo(json.dumps(event_object(record), ensure_ascii=False))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo(LINE_COLUMNS[:width])
    for record in select_events(scan, selection):
        click.echo(event_line(record)[:width])


def _refuse_unknown(option: str, wanted: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in wanted:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of: {', '.join(known)}", param_hint=option)


@log_commands.command("verify")
@_run
@_json
def verify_command(run: Path, as_json: bool) -> None:
    """Verify every byte of a log, fold its events, and compare the checkpoints with it.

    A torn tail, as a crash leaves it, is no damage. Exit code 6: the log is damaged; 11: its events do not fit each
    other; 13: a committed checkpoint is not what it should be.

    \b
    Example
      kinlog log verify runs/first
    """
    verification = verify_everything(locate_run(run))
    if as_json:
        document = to_json_value(verification)
        assert isinstance(document, dict)
        _echo_json({"sound": verification.sound, **document})
    else:
        click.echo(render_verification(verification))
    damage = verification.damage
    if damage is not None:
        raise LogDamagedError(
            damage.what,
            segment=damage.segment,
            offset_bytes=damage.offset_bytes,
            seq=damage.seq,
            expected=damage.expected,
            found=damage.found,
        )
    if verification.impossible:
        raise TransitionError(verification.impossible)
    if verification.broken_checkpoints:
        broken = verification.broken_checkpoints[0]
        raise CheckpointError(
            f"{broken.name}: {broken.problem or 'its projection is not what this kinlog makes of the log'}"
        )


@click.command("plan")
@_run
@_json
@click.option("--checkpoint", metavar="NAME", help="From this checkpoint, instead of the newest usable one.")
@click.option(
    "--missing-rows",
    type=click.Choice(["refuse", "redispatch"]),
    help="Instead of the configuration's choice.",
)
@click.option(
    "--future-weights", type=click.Choice(["reuse", "discard"]), help="Instead of the configuration's choice."
)
@click.option(
    "--discard-rollouts",
    is_flag=True,
    help="As if everything that was not trained on yet were generated again.",
)
@click.option(
    "--siblings", is_flag=True, help="Also list everything redone or dropped, one by one, with the reason."
)
def plan_command(
    run: Path,
    as_json: bool,
    checkpoint: str | None,
    missing_rows: Literal["refuse", "redispatch"] | None,
    future_weights: Literal["reuse", "discard"] | None,
    discard_rollouts: bool,
    siblings: bool,
) -> None:
    """Show what a restart would do now, and why. Changes nothing.

    The choices of the run's latest life are used, from its resolved_config.yaml, where there is one.

    \b
    Example
      kinlog plan runs/first
      kinlog plan runs/first --siblings --future-weights discard
    """
    directory = locate_run(run)
    config = load_config(directory.config) if directory.config.is_file() else None
    defaults = config.rollout_recovery if config is not None else RecoveryPolicy()
    offline = plan_offline(
        directory,
        policy=RecoveryPolicy(
            missing_rows=missing_rows or defaults.missing_rows,
            future_weights=future_weights or defaults.future_weights,
            discard_rollouts=discard_rollouts,
        ),
        checkpoint=checkpoint,
        is_stale=_staleness(config) if config is not None else None,
    )
    if as_json:
        _echo_json({"report": to_json_value(offline.report), "plan": to_json_value(offline.plan)})
        return
    click.echo(render_report(offline.report))
    if siblings:
        click.echo(f"\nredone and dropped\n\n{render_redone(offline.plan)}")


def _staleness(config: RunConfig) -> Callable[[Projection, GroupState], bool]:
    return build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step).is_stale


@click.command("proof")
@_run
@_json
@click.option(
    "--steps",
    "reward_steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Steps at either end that the mean reward is taken over.",
)
def proof_command(run: Path, as_json: bool, reward_steps: int) -> None:
    """Prove from the log alone that nothing was lost or trained on twice. Exit code 1 if it does not hold.

    \b
    Example
      kinlog proof runs/first
    """
    proof = prove(scan_log(locate_run(run).log), reward_steps=reward_steps)
    if as_json:
        document: Any = to_json_value(proof)
        _echo_json({"holds": proof.holds, "failures": list(proof.failures), **document})
    else:
        click.echo(render_proof(proof))
    if not proof.holds:
        click.get_current_context().exit(1)
