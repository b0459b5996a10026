"""The registry of metrics: complete and well-formed. That docs/metrics.md is what it says is held with the other references."""

import re

from kinlog.controller.metric_kinds import Kind, Scope
from kinlog.controller.metrics import METRICS
from kinlog.schemas.events import EVENT_TYPES
from kinlog.schemas.reasons import Reason


def test_every_metric_has_a_name_of_its_own_by_the_rules_of_prometheus():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"kinlog_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
        assert metric.unit
        assert metric.help.endswith(".")
        assert (metric.scope is Scope.NOW) is (metric.kind is Kind.GAUGE)
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        if metric.unit == "seconds":
            assert "_seconds" in metric.name


def test_every_reason_is_a_label_value_wherever_there_are_reasons():
    labels = [label for metric in METRICS for label in metric.labels if label.name == "reason"]
    assert len(labels) >= 6
    for label in labels:
        assert set(label.values) == {reason.value for reason in Reason}


def test_every_kind_of_event_is_counted():
    (events,) = (metric for metric in METRICS if metric.name == "kinlog_events_total")
    assert set(events.labels[0].values) == set(EVENT_TYPES)
