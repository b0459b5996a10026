"""Serving metrics to Prometheus. Imported only where that is switched on."""

from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kinlog.controller.metric_kinds import Kind
from kinlog.controller.metrics_values import Distribution, MetricValues, Sample
from kinlog.schemas.errors import ConfigError

__all__ = ["PrometheusEndpoint"]


class PrometheusEndpoint:
    """Serves the present values at ``/metrics`` on a port, from a thread of its own, until it is closed.

    Raises
    ------
    ConfigError
        The port is taken, or may not be used.
    """

    def __init__(self, values: MetricValues, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(_Values(values))
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"metrics.prometheus_port is {port}, and nothing can be served there: {error.strerror}. Set another one, "
                "or 0 for one that is free."
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving, and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Values(Collector):
    def __init__(self, values: MetricValues) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for metric, samples in groupby(self._values.samples(), key=lambda sample: sample.metric):
            names = [label.name for label in metric.labels]
            if metric.kind is Kind.HISTOGRAM:
                yield _histogram(samples, names)
                continue
            family: CounterMetricFamily | GaugeMetricFamily
            if metric.kind is Kind.COUNTER:
                family = CounterMetricFamily(metric.name, metric.help, labels=names)
            else:
                family = GaugeMetricFamily(metric.name, metric.help, labels=names)
            for sample in samples:
                assert not isinstance(sample.value, Distribution)
                family.add_metric(sample.labels, sample.value)
            yield family


def _histogram(samples: Iterable[Sample], names: list[str]) -> Metric:
    family: HistogramMetricFamily | None = None
    for metric, labels, value in samples:
        assert isinstance(value, Distribution)
        family = family or HistogramMetricFamily(metric.name, metric.help, labels=names)
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        cumulated = accumulate(value.counts)
        family.add_metric(labels, buckets=list(zip(bounds, cumulated, strict=True)), sum_value=value.sum)
    assert family is not None
    return family
