"""Every benchmark runs, in a form so short that its figures mean nothing."""

import subprocess
import sys
from pathlib import Path

import msgspec

BENCH = Path(__file__).parent.parent.parent / "bench"


def test_append_bench_compares_all_contenders(tmp_path: Path):
    report = tmp_path / "append.json"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCH / "append.py"),
            *("--commits", "2", "--rounds", "2", "--directory", str(tmp_path), "--json", str(report)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = msgspec.json.decode(report.read_bytes())
    assert [m["events_per_commit"] for m in measured] == [1, 16, 256]
    assert all(set(m["median_s"]) == {"kinlog", "sqlite", "jsonl"} for m in measured)
    assert "sqlite/kinlog" in done.stdout
