"""What metrics came to: by name and labels, from where they are kept, from Prometheus' endpoint, and from TensorBoard's files."""

import struct
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tensorboardX.proto.event_pb2 import Event

from kinlog.controller.metric_kinds import Metric
from kinlog.controller.metrics_values import Distribution, MetricValues

Labelled = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels in order."""


def kept(values: MetricValues) -> dict[Labelled, float | Distribution]:
    return {(metric.name, labels): value for metric, labels, value in values.samples()}


def number(values: MetricValues, metric: Metric, *labels: str) -> float:
    value = kept(values).get((metric.name, labels), 0.0)
    assert not isinstance(value, Distribution)
    return value


def distribution(values: MetricValues, metric: Metric, *labels: str) -> Distribution:
    value = kept(values)[metric.name, labels]
    assert isinstance(value, Distribution)
    return value


def scraped(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What Prometheus would read: sample name and labels -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def tensorboard_events(directory: Path) -> list[Event]:
    """The events of all files, oldest file first."""
    events = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            # A record: its length, a checksum of that, the record, and its checksum.
            (size,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + size]))
            at += 12 + size + 4
    return events


def tensorboard_scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, without what a later life has hidden."""
    scalars: dict[str, dict[int, float]] = {}
    for event in tensorboard_events(directory):
        if event.HasField("session_log"):
            for steps in scalars.values():
                for step in [step for step in steps if step >= event.step]:
                    del steps[step]
        for value in event.summary.value:
            scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    return scalars
