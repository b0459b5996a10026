"""Every bench runs, in a form so short that its figures mean nothing, and reports in the one shape that all have."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from measure import Report

BENCH = Path(__file__).parent.parent.parent / "bench"
BENCHES = sorted(path.stem for path in BENCH.glob("*.py") if "\n    run_bench(" in path.read_text())


def test_there_are_benches():
    assert {"append", "bytes_per_event", "event_loop_lag"} <= set(BENCHES)


#: What starts a real cluster.
REAL = {"row_journal"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.e2e] if name in REAL else []) for name in BENCHES]
)
def test_bench_runs_and_reports_every_comparison(name, tmp_path):
    target = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / f"{name}.py"), "--smoke"),
            *("--json", str(target), "--directory", str(tmp_path / "scratch")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the figures mean nothing" in done.stdout
    report = msgspec.json.decode(target.read_bytes(), type=Report)
    assert (report.bench, report.smoke) == (name, True)
    assert report.comparisons
    for comparison in report.comparisons:
        assert list(comparison.ratios) == list(comparison.costs)[1:]
        assert comparison.case in done.stdout
    assert not list((tmp_path / "scratch").iterdir()), "a bench leaves nothing behind"
