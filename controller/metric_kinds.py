"""What a metric is: its kind, and what becomes of it over a restart."""

from enum import StrEnum
from typing import NamedTuple

__all__ = ["Kind", "Label", "Metric", "Scope"]


class Kind(StrEnum):
    """What its values are."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(StrEnum):
    """What a counter or histogram begins with when a run is resumed."""

    RUN = "run"
    """With what the log amounts to: it goes on over restarts."""
    LIFE = "life"
    """With nothing: it counts this life of the run."""
    NOW = "now"
    """A gauge: it is as it is."""


class Label(NamedTuple):
    """A label, and every value that it can have."""

    name: str
    values: tuple[str, ...]
    """Empty: any."""


class Metric(NamedTuple):
    """One metric."""

    section: str
    name: str
    kind: Kind
    unit: str
    scope: Scope
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, without the infinite one."""
