"""Writing metrics for TensorBoard. Imported only where that is switched on."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tensorboardX import SummaryWriter

from kinlog.controller.metric_kinds import Kind
from kinlog.controller.metrics_values import Distribution, MetricValues, Sample

__all__ = ["TensorBoardFiles", "scalars_of"]

_logger = logging.getLogger(__name__)


class TensorBoardFiles:
    """Writes the present values once a step, from a thread of its own.

    Parameters
    ----------
    life:
        The number of this life of the run, which its file is named by: two lives may begin in one second.
    first_step:
        What an earlier life wrote of this step and later ones is hidden: it was rolled back.
    """

    def __init__(self, values: MetricValues, directory: Path, *, life: int, first_step: int) -> None:
        self._values = values
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kinlog-tensorboard")
        self._writer: SummaryWriter | None = None
        self._directory = directory
        self._life = life
        self._first_step = first_step

    def write(self, train_step: int) -> None:
        """Have the values of this moment written, as those of a step. A disk that fails costs metrics, not the run."""
        self._thread.submit(self._write, self._values.samples(), train_step)

    def close(self) -> None:
        """Write what is still to be written."""
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.close()

    def _write(self, samples: list[Sample], train_step: int) -> None:
        try:
            if self._writer is None:
                self._writer = SummaryWriter(
                    logdir=str(self._directory),
                    purge_step=self._first_step,
                    filename_suffix=f".life-{self._life:08d}",
                )
            for tag, value in scalars_of(samples).items():
                self._writer.add_scalar(tag, value, train_step)
            self._writer.flush()
        except OSError as error:
            _logger.warning("the metrics of step %d are not in %s: %s", train_step, self._directory, error)


def scalars_of(samples: list[Sample]) -> dict[str, float]:
    """Return values by tag: ``section/name`` and the labels' values. Of a histogram, its mean and its count.

    What never happened is left out: a counter under each of twenty reasons would bury the others. So is what tells by its
    labels alone.
    """
    scalars: dict[str, float] = {}
    for metric, labels, value in samples:
        if not all(label.values for label in metric.labels):
            continue
        tag = "/".join((metric.section, metric.name.removeprefix("kinlog_"), *labels))
        if isinstance(value, Distribution):
            scalars[f"{tag}/mean"] = value.sum / value.total
            scalars[f"{tag}/count"] = value.total
        elif metric.kind is Kind.GAUGE or value:
            scalars[tag] = value
    return scalars
