"""What a person who trains is told: one line a thing, and on a terminal one that is written over."""

import io

from kinlog_lives import first_life, run_config
from kinlog_progress import STATUS
from rich.console import Console

from kinlog.controller.checkpoint import SavedCheckpoint
from kinlog.controller.progress import checkpoint_line, restart_line, status_line, step_line
from kinlog.controller.progress_output import ProgressOutput
from kinlog.replay.recovery.offline_plan import plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.schemas.orders import TrainMetrics

METRICS = TrainMetrics(
    train_step=7,
    weight_version=7,
    loss=-0.01234,
    grad_norm=0.5,
    clip_fraction=0.0,
    mean_raw_reward=0.3125,
    mean_shaped_reward=0.25,
    rows=32,
    mixed_rows=3,
    loss_tokens=400,
    token_lag=0.25,
    seconds=1.5,
)


def test_step_is_one_line_with_reward_speed_staleness_load_and_eta():
    assert step_line(METRICS, STATUS) == (
        "step  7/40  reward 0.312  shaped 0.250  loss -0.0123    1,234 tok/s  stale 0.8 (max 2)    7 live,  19 in flight"
        "  2.2 s/step  ETA 1.2 min"
    )


def test_checkpoint_is_one_line_with_what_it_cost_or_why_there_is_none():
    saved = SavedCheckpoint("step_000010", 1.234, 0.0156)
    assert (
        checkpoint_line(saved) == "checkpoint step_000010 in 1.23 s, of which everything was held for 16 ms"
    )
    failed = SavedCheckpoint("step_000010", 1.0, 0.0, "OSError: full")
    assert checkpoint_line(failed) == "checkpoint step_000010 FAILED, the previous one stands: OSError: full"


def test_status_says_what_is_alive_and_what_is_not_durable_yet():
    assert status_line(STATUS) == (
        "step 7/40  |  5 generating, 2 finalized  |  19 in flight  |  1,234 tok/s  |  3 events not durable yet"
        "  |  ETA 1.2 min"
    )


async def test_status_of_a_run_follows_its_ledger(tmp_path):
    life = await first_life(tmp_path / "run", run_config(trainer__max_steps=6))
    await life.train_until(lambda p: p.train_step == 4)
    status = life.controller.status()
    assert (status.train_step, status.max_steps) == (4, 6)
    assert status.running_siblings == sum(
        sibling.running for group in life.p.live_groups() for sibling in group.siblings.values()
    )
    assert status.tokens_per_second > 0
    assert status.seconds_per_step is not None
    assert status.eta_s is not None
    await life.finish()


async def test_restart_is_summed_up_in_one_line(tmp_path):
    life = await first_life(tmp_path / "run", run_config(trainer__max_steps=6))
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    report = plan_offline(life.directory, policy=RecoveryPolicy()).report
    line = restart_line(report)
    assert line.startswith("restarted from step_000002, step 2: ")
    assert f"{report.siblings_reused} sibling" in line
    assert "1 step rolled back" in line
    assert "\n" not in line


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(
        file=file, force_terminal=terminal, width=40, soft_wrap=True, highlight=False, markup=False
    ), file


def test_lines_in_a_log_are_plain_and_whole_and_there_is_no_status():
    console, file = _console(terminal=False)
    with ProgressOutput(quiet=False, console=console) as output:
        output.say("[a line] that is much longer than the terminal is wide, and is not broken")
        output.show("step 1/2")
        output.insist("done")
    assert file.getvalue() == (
        "[a line] that is much longer than the terminal is wide, and is not broken\ndone\n"
    )


def test_quiet_prints_only_what_has_to_be_known():
    for terminal in (False, True):
        console, file = _console(terminal=terminal)
        with ProgressOutput(quiet=True, console=console) as output:
            output.say("step 1/2")
            output.show("step 1/2")
            output.insist("checkpoint FAILED")
        assert file.getvalue() == "checkpoint FAILED\n"


def test_terminal_has_a_line_that_is_written_over_below_the_others():
    console, file = _console(terminal=True)
    with ProgressOutput(quiet=False, console=console) as output:
        output.show("step 1/2")
        output.say("step 1 is done")
        output.show("step 2/2 | and much that does not fit into one line of it")
    text = file.getvalue()
    assert "step 1 is done\n" in text
    assert "into one line" not in text
    assert text.index("step 1/2") < text.index("step 1 is done") < text.index("step 2/2")
