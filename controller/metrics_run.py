"""The metrics of one life of a controller: counted and given out where the configuration says so; how fast it goes, always."""

import asyncio
import importlib
import socket
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kinlog.controller import metrics as m
from kinlog.controller.metrics_events import EventMetrics
from kinlog.controller.metrics_gauges import measure_gauges
from kinlog.controller.metrics_values import MetricValues
from kinlog.controller.runtime import Runtime
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.watch.rates import StepPace, TokenRate
from kinlog.schemas.errors import MissingExtraError
from kinlog.schemas.events import CheckpointCommitted, RecordedEvent, SiblingSealed, StepApplied
from kinlog.schemas.orders import TrainMetrics
from kinlog.schemas.settings import MetricsSettings

if TYPE_CHECKING:
    from kinlog.controller.metrics_prometheus import PrometheusEndpoint
    from kinlog.controller.metrics_tensorboard import TensorBoardFiles

__all__ = ["RunMetrics", "refuse_missing_extra"]

_LAG_PROBE_S = 0.25
_PROBES_PER_LOOK = 4


def refuse_missing_extra(settings: MetricsSettings) -> None:
    """Raise ``MissingExtraError`` when metrics are switched on and what writes them is not installed."""
    for key, wanted, package in (
        ("tensorboard", settings.tensorboard, "tensorboardX"),
        ("prometheus_port", settings.prometheus_port is not None, "prometheus_client"),
    ):
        if wanted and find_spec(package) is None:
            raise MissingExtraError(
                f"metrics.{key} needs {package}, which is not installed. Install it with: "
                'pip install "kinlog[metrics]", or leave the key out'
            )


class RunMetrics:
    """Counts what happens, and serves and writes it. Belongs to one event loop."""

    def __init__(self, settings: MetricsSettings, directory: RunDirectory) -> None:
        self._settings = settings
        self._directory = directory
        self.values = MetricValues()
        self._events = EventMetrics(self.values)
        self._runtime: Runtime | None = None
        self._endpoint: PrometheusEndpoint | None = None
        self._files: TensorBoardFiles | None = None
        self._saved_us: int | None = None
        self._began_us = 0
        self.tokens = TokenRate()
        self.pace = StepPace()

    @property
    def enabled(self) -> bool:
        """Whether anybody is given them."""
        return self._settings.tensorboard or self._settings.prometheus_port is not None

    @property
    def address(self) -> str | None:
        """Where Prometheus finds them, once it can."""
        return (
            None if self._endpoint is None else f"http://{socket.gethostname()}:{self._endpoint.port}/metrics"
        )

    def open(self) -> None:
        """Begin to serve them, before anything else of the run is started.

        Raises
        ------
        MissingExtraError
            What is needed for it is not installed.
        ConfigError
            The port is taken.
        """
        refuse_missing_extra(self._settings)
        if self._settings.tensorboard:
            # Here and not at the first step: the import takes a while.
            importlib.import_module("kinlog.controller.metrics_tensorboard")
        if self._settings.prometheus_port is not None:
            from kinlog.controller.metrics_prometheus import PrometheusEndpoint

            self._endpoint = PrometheusEndpoint(self.values, self._settings.prometheus_port)

    def attach(self, runtime: Runtime, *, run_id: str, version: str) -> None:
        """Go on from what the log amounts to, and look at a runtime from now on."""
        self._runtime = runtime
        self._began_us = runtime.clock_us()
        self._events.restore(runtime.projection)
        self.values.set(m.RUN_INFO, 1, run_id, version)

    def observe(self, records: Sequence[RecordedEvent]) -> None:
        """Count what a commit recorded."""
        for record in records:
            match record.event:
                case SiblingSealed():
                    self.tokens.add(record.time_us, record.event.completion_tokens)
                case StepApplied():
                    self.pace.add(record.event.train_step, record.time_us)
                case CheckpointCommitted():
                    self._saved_us = record.time_us
        if self.enabled:
            assert self._runtime is not None, "attach() comes first"
            self._events.observe(records, self._runtime.projection)

    def tokens_per_second(self, now_us: int) -> float:
        """Return the completion tokens a second of the last minute, or of this life if it is younger."""
        return self.tokens.per_second(now_us, since_us=self._began_us)

    def stepped(self, metrics: TrainMetrics) -> None:
        """Count what the trainer says of a step that was applied, and have everything written."""
        values = self.values
        values.set(m.RAW_REWARD, metrics.mean_raw_reward)
        values.set(m.SHAPED_REWARD, metrics.mean_shaped_reward)
        values.set(m.LOSS, metrics.loss)
        values.set(m.GRAD_NORM, metrics.grad_norm)
        values.set(m.CLIP_FRACTION, metrics.clip_fraction)
        values.set(m.TOKEN_LAG, metrics.token_lag)
        values.set(m.MIXED_ROWS, metrics.mixed_rows)
        values.observe(m.TRAINER_STEP_SECONDS, metrics.seconds)
        if not self._settings.tensorboard:
            return
        if self._files is None:
            from kinlog.controller.metrics_tensorboard import TensorBoardFiles

            assert self._runtime is not None, "attach() comes first"
            life = self._runtime.ledger.writer.epoch
            self._files = TensorBoardFiles(
                values, self._directory.tensorboard, life=life, first_step=metrics.train_step
            )
        self.look()
        self._files.write(metrics.train_step)

    def recovered(self, seconds: dict[str, float]) -> None:
        """Say what the phases of this life's restart took."""
        for phase, taken_s in seconds.items():
            self.values.set(m.RECOVERY_SECONDS, taken_s, phase.replace(" ", "_"))

    def look(self) -> None:
        """Measure what is as it is at a moment."""
        assert self._runtime is not None
        now_us = self._runtime.clock_us()
        measure_gauges(self.values, self._runtime, self.tokens_per_second(now_us))
        if self._saved_us is not None:
            self.values.set(m.CHECKPOINT_AGE, max(0, now_us - self._saved_us) / 1e6)

    async def run(self) -> None:
        """Look once a second, and measure the event loop's lag, until cancelled."""
        clock_s = asyncio.get_running_loop().time
        while True:
            self.look()
            for _ in range(_PROBES_PER_LOOK):
                due_s = clock_s() + _LAG_PROBE_S
                await asyncio.sleep(_LAG_PROBE_S)
                self.values.observe(m.EVENT_LOOP_LAG, max(0.0, clock_s() - due_s))

    def close(self) -> None:
        """Write what is still to be written, and stop serving."""
        files, self._files = self._files, None
        endpoint, self._endpoint = self._endpoint, None
        if files is not None:
            files.close()
        if endpoint is not None:
            endpoint.close()
