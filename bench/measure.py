"""What every bench shares: contenders that take turns, medians with their spread, one printed table, one JSON report.

Every bench is run as ``python bench/NAME.py [--smoke] [--json FILE] [--directory DIR]``. Its figures are costs: less is
better. A ratio is theirs divided by ours, from the same round: above 1, ours is better. ``--smoke`` is so short that the
figures mean nothing; it shows that the bench runs.

A bench is a function from :class:`Setup` to comparisons, and ends in::

    if __name__ == "__main__":
        run_bench("append", "Durable appends beside SQLite and JSON Lines", measure_appends)
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

__all__ = ["Setup", "Spread", "Comparison", "Report", "spread_of", "take_turns", "compare", "run_bench"]

#: In the working tree and not in /tmp, which is memory on many machines: there a sync costs nothing.
DEFAULT_DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "bench"


class Setup(NamedTuple):
    """How a bench is to run."""

    directory: Path
    """Empty, on a real disk, removed afterwards."""
    smoke: bool


class Spread(msgspec.Struct, frozen=True):
    """The median of the rounds, and how far apart they were."""

    median: float
    p10: float
    p90: float
    rounds: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a report: what ours and each of theirs cost in the same case."""

    case: str
    unit: str
    costs: dict[str, Spread]
    """By contender, ours first."""
    ratios: dict[str, Spread]
    """By each of theirs: theirs divided by ours, round by round."""
    at_least: dict[str, float] = {}
    """The ratio aimed at, by contender."""
    at_most: float | None = None
    """The cost of ours aimed at."""
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether every figure aimed at was reached, by the medians."""
        ours = next(iter(self.costs.values())).median
        return all(self.ratios[name].median >= ratio for name, ratio in self.at_least.items()) and (
            self.at_most is None or ours <= self.at_most
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a bench writes as JSON."""

    bench: str
    title: str
    smoke: bool
    machine: dict[str, str]
    comparisons: list[Comparison]


def spread_of(values: Sequence[float]) -> Spread:
    """Return the median of ``values`` and their 10th and 90th percentiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[0], tenths[-1], len(values))


def take_turns(contenders: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Call every contender once a round, so that a noisy moment hits all of them; another one begins each round."""
    names = list(contenders)
    costs: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            costs[name].append(contenders[name]())
    return costs


def compare(
    case: str,
    unit: str,
    costs: Mapping[str, Sequence[float]],
    *,
    at_least: Mapping[str, float] | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Comparison:
    """Compare costs of the same rounds. The first contender is ours.

    Parameters
    ----------
    unit:
        Of every cost, as it is printed.
    at_least, at_most:
        The ratios by contender, and the cost of ours, that are aimed at. Missing one is printed, and fails nothing.
    """
    ours, *theirs = costs
    ratios = {
        name: spread_of([other / own for own, other in zip(costs[ours], costs[name], strict=True)])
        for name in theirs
    }
    return Comparison(
        case=case,
        unit=unit,
        costs={name: spread_of(values) for name, values in costs.items()},
        ratios=ratios,
        at_least=dict(at_least or {}),
        at_most=at_most,
        note=note,
    )


def run_bench(
    name: str,
    title: str,
    measure: Callable[[Setup], Iterable[Comparison]],
    arguments: Sequence[str] | None = None,
) -> Report:
    """Run a bench as the command line says, print its table, and write its report.

    Parameters
    ----------
    measure:
        Yields one comparison after another; ours is the first of the costs.
    arguments:
        In place of the process's own.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--smoke", action="store_true", help="so short that the figures mean nothing")
    parser.add_argument("--json", type=Path, help=f"the report; by default build/bench/{name}.json")
    parser.add_argument(
        "--directory", type=Path, default=DEFAULT_DIRECTORY, help="where to write, on a real disk"
    )
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=options.directory))
    try:
        comparisons = list(measure(Setup(scratch, options.smoke)))
    finally:
        shutil.rmtree(scratch)
    report = Report(bench=name, title=title, smoke=options.smoke, machine=_machine(), comparisons=comparisons)
    print(_rendered(report))
    target = options.json or DEFAULT_DIRECTORY / f"{name}{'.smoke' if options.smoke else ''}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def _machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()),
    }


def _rendered(report: Report) -> str:
    lines = [report.title + (" (smoke: the figures mean nothing)" if report.smoke else "")]
    for one in report.comparisons:
        lines.append(f"\n{one.case}")
        width = max(len(name) for name in one.costs)
        for name, cost in one.costs.items():
            line = f"  {name:<{width}}  {_figure(cost):>32} {one.unit}"
            if name in one.ratios:
                line += f"   {_figure(one.ratios[name])} x ours"
            if name in one.at_least:
                line += f", at least {one.at_least[name]:g} aimed at"
            if name not in one.ratios and one.at_most is not None:
                line += f"   at most {one.at_most:g} aimed at"
            lines.append(line)
        if one.at_least or one.at_most is not None:
            lines.append("  met" if one.met else "  MISSED")
        if one.note:
            lines.append(f"  {one.note}")
    return "\n".join(lines)


def _figure(spread: Spread) -> str:
    text = _rounded(spread.median)
    if spread.rounds > 1:
        text += f" ({_rounded(spread.p10)}..{_rounded(spread.p90)})"
    return text


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
