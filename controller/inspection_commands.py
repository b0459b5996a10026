"""The commands that read a run: ``kinlog log ls|stats|verify|salvage``, ``kinlog plan`` and ``kinlog audit``.

They need the base install only, take no lock and change nothing of the run.
"""

from pathlib import Path
from typing import Literal

import click
import msgspec

from kinlog.controller.command_parameters import echo_json, json_option, run_argument
from kinlog.controller.inspection_text import (
    render_segments,
    render_statistics,
    render_verification,
)
from kinlog.controller.salvage_text import render_salvage
from kinlog.controller.samplers import build_sampler, evictions
from kinlog.controller.show_command import show_command
from kinlog.lineage.scan import scan_log
from kinlog.replay.audit.audit import audit_log
from kinlog.replay.audit.statistics import collect_statistics
from kinlog.replay.audit.text import render_audit
from kinlog.replay.inspection import list_segments, locate_run
from kinlog.replay.integrity.salvage import salvage_log
from kinlog.replay.integrity.verify import verify_everything
from kinlog.replay.recovery.kill_loss import render_loss
from kinlog.replay.recovery.offline_plan import plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.replay.recovery.report import render_redone, render_report
from kinlog.replay.rendering import to_json_value
from kinlog.schemas.config import load_config
from kinlog.schemas.errors import CheckpointError, LogDamagedError, TransitionError

__all__ = ["log_commands", "plan_command", "audit_command"]


@click.group("log")
def log_commands() -> None:
    """Read a run's log, verify it, and save what can be saved of a damaged one.

    Every command that reads a log compares the checksum of every frame that it reads, and the chain of the files it reads,
    and refuses damage. That the events fit each other, and that the checkpoints are whole, is for log verify to look at.
    """


@log_commands.command("ls")
@run_argument()
@json_option()
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
      compacted stands for several segments, compressed
      replaced  is in a compacted one as well; the next life removes it
      dropped   stands for events that are gone: only their sum is left

    \b
    Example
      kinlog log ls runs/first
    """
    scan = scan_log(locate_run(run).log)
    segments = list_segments(scan)
    if as_json:
        echo_json(
            {
                "log": str(scan.directory),
                "run_id": scan.run_id,
                "log_id": scan.log_id,
                "segments": segments,
            }
        )
    else:
        click.echo(f"log of run {scan.run_id}: {scan.directory}\n\n{render_segments(segments)}")


@log_commands.command("stats")
@run_argument()
@json_option()
def stats_command(run: Path, as_json: bool) -> None:
    """Count what a log holds: groups, siblings, tokens, steps, checkpoints, restarts.

    \b
    Example
      kinlog log stats runs/first
      kinlog log stats runs/first --json | jq .siblings.superseded
    """
    statistics = collect_statistics(scan_log(locate_run(run).log))
    if as_json:
        echo_json(statistics)
    else:
        click.echo(render_statistics(statistics))


log_commands.add_command(show_command)


@log_commands.command("verify")
@run_argument()
@json_option()
def verify_command(run: Path, as_json: bool) -> None:
    """Verify every byte of a log, fold its events, compare the checkpoints with it, and say what to do.

    A torn tail, as a crash leaves it, is no damage.

    \b
    Exit codes
       0  the log is sound, and so are the checkpoints
       6  the log is damaged
       7  it was written by a newer kinlog
      11  its bytes are sound, and its events do not fit each other
      13  the log is sound, and a committed checkpoint is not what it should be

    \b
    Example
      kinlog log verify runs/first
    """
    verification = verify_everything(locate_run(run))
    if as_json:
        document = to_json_value(verification)
        assert isinstance(document, dict)
        echo_json({"sound": verification.sound, **document})
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


@log_commands.command("salvage")
@run_argument()
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the copy goes: a directory that is new or empty.",
)
@click.option(
    "--export",
    is_flag=True,
    help="Also write what is left out: its bytes, and its events as JSON lines. They cannot be replayed.",
)
@json_option()
def salvage_command(run: Path, target: Path, export: bool, as_json: bool) -> None:
    """Copy what can still be replayed of a damaged log to another directory, and say what is left out.

    The copy is the longest beginning of the log that verifies and whose events fit each other. RUN is not changed.

    \b
    Exit codes
       0  the copy is written; what is left out is listed
       4  the output directory holds something
       6  nothing can be saved
       7  the log was written by a newer kinlog: salvage it with that one
       8  the copy cannot be written

    \b
    Example
      kinlog log salvage runs/first -o runs/saved --export
    """
    salvage = salvage_log(locate_run(run), target, export=export)
    if as_json:
        echo_json(salvage)
    else:
        click.echo(render_salvage(salvage))
    if not salvage.events:
        click.get_current_context().exit(LogDamagedError.exit_code)


@click.command("plan")
@run_argument()
@json_option()
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
    """Show what a restart would do now, and why; and of a run that is alive, what a kill would cost it at this moment.

    Changes nothing, and takes no lock. The choices of the run's latest life are used, from its resolved_config.yaml, where
    there is one.

    \b
    Example
      kinlog plan runs/first
      kinlog plan runs/first --siblings --future-weights discard
    """
    directory = locate_run(run)
    config = load_config(directory.config) if directory.config.is_file() else None
    policy = RecoveryPolicy() if config is None else RecoveryPolicy.of(config)
    sampler = (
        None
        if config is None
        else build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
    )
    offline = plan_offline(
        directory,
        policy=msgspec.structs.replace(
            policy,
            missing_rows=missing_rows or policy.missing_rows,
            future_weights=future_weights or policy.future_weights,
            discard_rollouts=discard_rollouts,
        ),
        checkpoint=checkpoint,
        is_stale=None if sampler is None else sampler.is_stale,
        evict=lambda p, ready: [] if sampler is None else evictions(sampler, p, ready),
    )
    if as_json:
        echo_json({"report": offline.report, "loss": offline.loss, "plan": offline.plan})
        return
    click.echo(f"{render_report(offline.report)}\n\n{render_loss(offline.loss)}")
    if siblings:
        click.echo(f"\nredone and dropped\n\n{render_redone(offline.plan)}")


@click.command("audit")
@run_argument()
@json_option()
@click.option(
    "--list",
    "listed",
    is_flag=True,
    help="Also list everything redone or dropped, one by one, with the reason.",
)
@click.option(
    "--steps",
    "reward_steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Steps at either end that the mean reward is taken over.",
)
def audit_command(run: Path, as_json: bool, listed: bool, reward_steps: int) -> None:
    """Audit a run from its log alone. Exit code 1 if anything is off, with what it is.

    \b
    It holds when
      every prompt that was drawn was applied, dropped, parked, or is alive
      no group was trained on twice on the surviving history
      everything redone or dropped has a reason
      what was dropped is no longer than what was trained on

    \b
    Example
      kinlog audit runs/first
      kinlog audit runs/first --list | grep stale
    """
    audit = audit_log(scan_log(locate_run(run).log), reward_steps=reward_steps)
    if as_json:
        document = to_json_value(audit)
        assert isinstance(document, dict)
        if not listed:
            del document["given_up"]
        facts = {
            "holds": audit.holds,
            "failures": audit.failures,
            "attempts_redone": audit.given_up_by_reason(dropped=False),
            "siblings_dropped": audit.given_up_by_reason(dropped=True),
        }
        echo_json(facts | document)
    else:
        click.echo(render_audit(audit, listed=listed))
    if not audit.holds:
        click.get_current_context().exit(1)
