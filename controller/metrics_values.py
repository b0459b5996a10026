"""The present values of metrics, whoever reads them. Written to by the controller's event loop, and read by any thread."""

from bisect import bisect_left
from itertools import product
from threading import Lock
from typing import NamedTuple

from kinlog.controller.metric_kinds import Kind, Metric
from kinlog.controller.metrics import METRICS

__all__ = ["Distribution", "MetricValues", "Sample"]


_PLACES = {metric.name: place for place, metric in enumerate(METRICS)}


class Distribution(NamedTuple):
    """A histogram's value."""

    counts: tuple[int, ...]
    """By bucket, the last one's bound being infinite; not cumulated."""
    sum: float

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


class Sample(NamedTuple):
    """A metric's value under one combination of labels."""

    metric: Metric
    labels: tuple[str, ...]
    """In the order of ``metric.labels``."""
    value: float | Distribution


class _Buckets:
    def __init__(self, metric: Metric) -> None:
        self.bounds = metric.buckets
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum = 0.0


class MetricValues:
    """Holds them. A counter over a closed set of labels is there from the beginning, as 0: its first increase is seen."""

    def __init__(self) -> None:
        self._lock = Lock()
        # By name: a metric's own hash would be computed anew each time.
        self._numbers: dict[tuple[str, tuple[str, ...]], float] = {}
        self._buckets: dict[tuple[str, tuple[str, ...]], _Buckets] = {}
        for metric in METRICS:
            if metric.kind is Kind.COUNTER:
                for labels in product(*(label.values for label in metric.labels)):
                    self._numbers[metric.name, labels] = 0.0

    def add(self, metric: Metric, amount: float = 1.0, *labels: str) -> None:
        """Increase a counter."""
        assert metric.kind is Kind.COUNTER, metric.name
        assert len(labels) == len(metric.labels), metric.name
        key = (metric.name, labels)
        with self._lock:
            self._numbers[key] = self._numbers.get(key, 0.0) + amount

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge, or a counter that is counted elsewhere."""
        assert metric.kind is not Kind.HISTOGRAM, metric.name
        assert len(labels) == len(metric.labels), metric.name
        with self._lock:
            self._numbers[metric.name, labels] = float(value)

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Count a value of a histogram."""
        assert metric.kind is Kind.HISTOGRAM, metric.name
        with self._lock:
            buckets = self._buckets.get((metric.name, labels))
            if buckets is None:
                buckets = self._buckets[metric.name, labels] = _Buckets(metric)
            buckets.counts[bisect_left(buckets.bounds, value)] += 1
            buckets.sum += value

    def samples(self) -> list[Sample]:
        """Return all values as of one moment, in the order of ``METRICS``."""
        with self._lock:
            values: dict[tuple[str, tuple[str, ...]], float | Distribution] = {
                **self._numbers,
                **{key: Distribution(tuple(b.counts), b.sum) for key, b in self._buckets.items()},
            }
        ordered = sorted(values.items(), key=lambda item: (_PLACES[item[0][0]], item[0][1]))
        return [Sample(METRICS[_PLACES[name]], labels, value) for (name, labels), value in ordered]
