"""A run's metrics: served and written where that is switched on, for whole lives on in-memory parts; and nothing of it else."""

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from kinlog_fake_parts import FakeParts
from kinlog_lives import Life, events_of, first_life, history, next_life, run_config
from kinlog_metrics import kept, number, scraped, tensorboard_scalars

from kinlog.controller import metrics as m
from kinlog.controller import metrics_run
from kinlog.controller.metrics_prometheus import PrometheusEndpoint
from kinlog.controller.metrics_run import RunMetrics, refuse_missing_extra
from kinlog.controller.metrics_values import MetricValues
from kinlog.lineage.run_directory import RunDirectory
from kinlog.schemas import events as e
from kinlog.schemas.errors import ConfigError, MissingExtraError
from kinlog.schemas.events import kind_of
from kinlog.schemas.reasons import Reason
from kinlog.schemas.settings import MetricsSettings

SERVED = {"metrics__prometheus_port": 0}


def _port(life: Life) -> int:
    address = life.controller.metrics.address
    assert address is not None
    return int(address.rpartition(":")[2].partition("/")[0])


def _failing(parts: FakeParts) -> None:
    parts.pool.fail(1, 0, 1, Reason.TIMEOUT)
    parts.pool.lose_worker(2, 1, 1)


async def test_metrics_of_a_whole_run_are_what_its_log_says(tmp_path: Path):
    parts = FakeParts()
    parts.prepare = _failing
    life = await (await first_life(tmp_path / "run", run_config(**SERVED), parts)).train()
    values = life.controller.metrics.values
    kinds = Counter(kind_of(type(record.event)) for record in history(tmp_path / "run"))
    assert {
        labels[0]: value for (name, labels), value in kept(values).items() if name == m.EVENTS.name and value
    } == kinds
    superseded = Counter(event.reason.value for event in events_of(tmp_path / "run", e.AttemptSuperseded))
    assert superseded == {"timeout": 1, "worker_lost": 1}
    for reason, count in superseded.items():
        assert number(values, m.SUPERSEDED, reason) == count
    assert number(values, m.SIBLINGS_SEALED) == life.p.sealed_total
    assert number(values, m.GROUPS_DRAWN) == life.p.drawn_total
    cleared = sum(event.num_rows for event in events_of(tmp_path / "run", e.RowsCleared))
    assert sum(v for (name, _), v in kept(values).items() if name == m.ROWS_CLEARED.name) == cleared


async def test_prometheus_reads_a_running_run_and_the_port_is_given_back(tmp_path: Path):
    life = await first_life(tmp_path / "run", run_config(**SERVED))
    await life.train_until(lambda p: p.train_step == 2 and bool(p.checkpoints))
    life.controller.metrics.look()
    found, values = scraped(_port(life)), life.controller.metrics.values
    status = life.controller.status()
    assert found["kinlog_train_step", frozenset()] == status.train_step == 2
    assert found["kinlog_siblings_in_flight", frozenset()] == status.running_siblings
    assert found["kinlog_log_seq", frozenset()] == status.appended_seq
    assert found["kinlog_live_groups", frozenset({("phase", "generating")})] == status.phases.get(
        "generating", 0
    )
    assert found["kinlog_siblings_sealed_total", frozenset()] == number(values, m.SIBLINGS_SEALED)
    trainer = frozenset({("kind", "trainer")})
    assert found["kinlog_checkpoints_committed_total", trainer] == 1
    assert found["kinlog_checkpoint_seconds_count", trainer] == 1
    assert found["kinlog_checkpoint_hold_seconds_bucket", trainer | {("le", "+Inf")}] == 1
    assert found["kinlog_attempts_superseded_total", frozenset({("reason", "evicted")})] == 0
    assert found["kinlog_cuts_total", frozenset({("kind", "checkpoint")})] == 1
    port = _port(life)
    await life.finish()
    PrometheusEndpoint(MetricValues(), port).close()


async def test_every_label_value_of_a_run_with_a_restart_is_documented(tmp_path: Path):
    config = run_config(trainer__max_steps=6, **SERVED)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    life.controller.metrics.close()
    resumed = await next_life(tmp_path / "run", config)
    await resumed.train_until(lambda p: p.train_step == 5)
    resumed.controller.metrics.look()
    for metric, labels, _ in resumed.controller.metrics.values.samples():
        for label, value in zip(metric.labels, labels, strict=True):
            assert not label.values or value in label.values, (metric.name, label.name, value)
    values, report = resumed.controller.metrics.values, resumed.report
    assert report is not None
    assert number(values, m.RESTARTS) == 1
    assert number(values, m.RECOVERY_SIBLINGS, "reused") == report.siblings_reused
    assert number(values, m.RECOVERY_SIBLINGS, "redispatched") == sum(report.siblings_redispatched.values())
    assert number(values, m.RECOVERY_SECONDS, "data_plane_load") == report.seconds["data plane load"]
    assert number(values, m.SIBLINGS_SEALED) == resumed.p.sealed_total
    await resumed.finish()


async def test_tensorboard_has_a_value_a_step_and_those_of_rolled_back_steps_are_replaced(tmp_path: Path):
    config = run_config(trainer__max_steps=6, metrics__tensorboard=True)
    life = await first_life(tmp_path / "run", config)
    await life.train_until(lambda p: p.train_step == 3)
    await life.kill()
    life.controller.metrics.close()
    directory = RunDirectory(tmp_path / "run").tensorboard
    assert tensorboard_scalars(directory)["progress/train_step"].items() >= {(1, 1.0), (2, 2.0)}
    resumed = await (await next_life(tmp_path / "run", config)).train()
    scalars = tensorboard_scalars(directory)
    assert scalars["progress/train_step"] == {step: step for step in range(1, 7)}
    assert scalars["siblings/siblings_sealed_total"][6] == pytest.approx(resumed.p.sealed_total, abs=6)
    assert set(scalars["recovery/recovery_seconds/choose_checkpoint"]) == set(range(3, 7))
    assert scalars["progress/restarts_total"] == dict.fromkeys(range(3, 7), 1)
    assert "siblings/attempts_superseded_total/evicted" not in scalars
    assert not any(tag.startswith("progress/run_info") for tag in scalars)


async def test_switched_off_there_is_no_file_no_thread_and_no_import(tmp_path: Path, monkeypatch):
    for name in ("kinlog.controller.metrics_prometheus", "kinlog.controller.metrics_tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    life = await first_life(tmp_path / "run")
    await life.train_until(lambda p: p.train_step == 2)
    assert life.controller.metrics.address is None
    assert not any(
        kept(life.controller.metrics.values)[m.EVENTS.name, (kind,)] for kind in m.EVENTS.labels[0].values
    )
    assert not any("tensorboard" in thread.name for thread in threading.enumerate())
    await life.finish()
    assert not RunDirectory(tmp_path / "run").tensorboard.exists()
    assert not {name for name in sys.modules if name.startswith("kinlog.controller.metrics_")} & {
        "kinlog.controller.metrics_prometheus",
        "kinlog.controller.metrics_tensorboard",
    }


async def test_port_that_is_taken_is_refused_before_anything_of_the_run_is_there(tmp_path: Path):
    taken = PrometheusEndpoint(MetricValues(), 0)
    try:
        with pytest.raises(ConfigError, match=rf"metrics.prometheus_port is {taken.port}.*in use"):
            await first_life(tmp_path / "run", run_config(metrics__prometheus_port=taken.port))
    finally:
        taken.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        (MetricsSettings(tensorboard=True), "tensorboardX"),
        (MetricsSettings(prometheus_port=0), "prometheus_client"),
    ],
)
def test_missing_extra_is_named_with_how_to_install_it(settings, package, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(metrics_run, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf'{package}.*pip install "kinlog\[metrics\]"'):
        RunMetrics(settings, RunDirectory(tmp_path)).open()
    refuse_missing_extra(MetricsSettings())


async def test_disk_that_fails_costs_metrics_and_not_the_run(tmp_path: Path, caplog):
    (tmp_path / "run").mkdir()
    RunDirectory(tmp_path / "run").tensorboard.write_text("in the way")
    life = await (await first_life(tmp_path / "run", run_config(metrics__tensorboard=True))).train()
    assert life.p.train_step == 4
    assert "the metrics of step 1 are not in" in caplog.text
