"""The ``kinlog`` command: reading a run needs the base install only; the runtime is imported when ``train`` needs it."""

import errno
import importlib
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from kinlog.controller.adopt import adopt_checkpoint
from kinlog.controller.at_command import at_command
from kinlog.controller.explain_command import explain_command
from kinlog.controller.history_commands import diff_command, examples_command
from kinlog.controller.inspection_commands import audit_command, log_commands, plan_command
from kinlog.controller.story_command import why_command
from kinlog.controller.table_commands import export_command, sql_command
from kinlog.controller.timeline_command import timeline_command
from kinlog.controller.watch_command import watch_command
from kinlog.lineage.run_directory import RunDirectory
from kinlog.schemas import errors
from kinlog.schemas.config import load_config
from kinlog.schemas.errors import KinlogError, MissingExtraError

__all__ = ["cli", "main"]


def _exit_codes() -> str:
    """Return the exit codes for the help, under the names that error messages have in brackets."""
    raised = [getattr(errors, name) for name in errors.__all__]
    codes = {error.exit_code: error.code for error in raised} | {
        0: "what was asked for is done, and what was checked holds",
        1: "the audit does not hold, or something unforeseen went wrong",
        2: "config, or wrong usage",
    }
    return "\b\nExit codes\n" + "\n".join(f"  {code:>2}  {name}" for code, name in sorted(codes.items()))


class _KinlogGroup(click.Group):
    """Ends with one clear line on stderr, and the error's own exit code, when a command raises on purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KinlogError as error:
            _complain(error.code, str(error))
            ctx.exit(error.exit_code)
        except OSError as error:
            # Click itself ends quietly when the reader of a pipe has gone; and without a file's name it is no user's
            # business, but a bug that needs its traceback.
            if error.errno == errno.EPIPE or not error.filename:
                raise
            _complain("io", f"{error.filename}: {error.strerror}")
            ctx.exit(1)


def _complain(code: str, message: str) -> None:
    click.echo(f"kinlog: error [{code}]: {message} (kinlog explain {code})", err=True)


@click.group(cls=_KinlogGroup, epilog=_exit_codes(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kinlog", prog_name="kinlog", message="%(prog)s %(version)s")
def cli() -> None:
    """An event-sourced checkpoint log for RL post-training rollouts.

    RUN is a run's directory, or its log directory. Reading a run never changes it, and works while it is being written.
    What an error means, and what to do about it, is told by explain.
    """


@cli.command("train")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Go on from wherever the run died.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The run's directory, instead of the configuration's run_dir.",
)
@click.option(
    "--checkpoint",
    help="With --resume: go back to this one, or to 'start', instead of the newest usable one.",
)
@click.option(
    "--discard-rollouts",
    is_flag=True,
    help="With --resume: keep every prompt, and generate again what was not trained on yet.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    help="What generates, instead of the configuration's generation.engine.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print only what goes wrong, and what a restart came to.")
def train_command(
    config: Path,
    resume: bool,
    run_dir: Path | None,
    checkpoint: str | None,
    discard_rollouts: bool,
    engine: str | None,
    quiet: bool,
) -> None:
    """Train as the YAML file CONFIG says.

    \b
    Example
      kinlog train run.yaml --run-dir runs/first
      kinlog train run.yaml --run-dir runs/first --resume
      kinlog train run.yaml --engine vllm
    """
    if checkpoint is not None and not resume:
        raise click.UsageError("--checkpoint says where to resume from: it goes with --resume")
    if discard_rollouts and not resume:
        raise click.UsageError(
            "--discard-rollouts says what to do with restored rollouts: it goes with --resume"
        )
    load_config(
        config, engine=engine
    )  # a misspelt key is told at once, not after the training stack is imported
    status: int = _runtime("launch").train(
        config,
        resume=resume,
        run_dir=run_dir,
        checkpoint=checkpoint,
        discard_rollouts=discard_rollouts,
        engine=engine,
        quiet=quiet,
    )
    click.get_current_context().exit(status)


@cli.command("restore")
@click.argument("checkpoint", type=click.Path(path_type=Path, file_okay=False))
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--anchor",
    type=click.Path(path_type=Path, file_okay=False),
    help="The trainer checkpoint that a rollout checkpoint goes with.",
)
def restore_command(checkpoint: Path, run_dir: Path, anchor: Path | None) -> None:
    """Make the new run directory RUN_DIR from the directory CHECKPOINT alone, as of its place in the log.

    \b
    Example
      kinlog restore /backup/step_000040 runs/second
      kinlog train run.yaml --run-dir runs/second --resume
    """
    name = adopt_checkpoint(checkpoint, RunDirectory(run_dir.resolve()), anchor=anchor)
    click.echo(f"{run_dir} goes on from {name}: kinlog train CONFIG --run-dir {run_dir} --resume")


@cli.command("demo")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the run goes; by default a new directory in runs/.",
)
@click.option(
    "--config", type=click.Path(path_type=Path), help="Train this instead of the embedded configuration."
)
@click.option(
    "--min-step", default=5, show_default=True, help="Kill after a checkpoint at this step or later."
)
def demo_command(run_dir: Path | None, config: Path | None, min_step: int) -> None:
    """Train, SIGKILL the run in the middle of generation, resume it, train to the end, and audit it from the log.

    \b
    Example
      kinlog demo
    """
    run_dir = run_dir or Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    _runtime("demo").run_demo(run_dir, config=config, min_step=min_step)


def _runtime(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"kinlog.controller.{module}")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] == "kinlog":
            raise
        raise MissingExtraError(
            f'training needs {missing}, which is not installed. Install it with: pip install "kinlog[train]"'
        ) from error


cli.add_command(explain_command)
cli.add_command(log_commands)
cli.add_command(plan_command)
cli.add_command(audit_command)
cli.add_command(at_command)
cli.add_command(why_command)
cli.add_command(examples_command)
cli.add_command(diff_command)
cli.add_command(watch_command)
cli.add_command(sql_command)
cli.add_command(export_command)
cli.add_command(timeline_command)


def main() -> None:
    """Run the command line."""
    cli(prog_name="kinlog")
