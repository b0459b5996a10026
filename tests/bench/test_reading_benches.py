"""The benches of reading, planning and checkpoints run, in a form so short that their figures mean nothing."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.mark.parametrize(
    ("name", "contenders"),
    [
        ("replay", {"kinlog", "naive"}),
        ("planning", {"kinlog"}),
        ("progress", {"kinlog", "every completion whole"}),
        (
            "tokens_redone",
            {
                "kinlog",
                "kinlog, prefix: discard",
                "kinlog, row journal off",
                "finished groups, at the checkpoint",
                "trainer checkpoint only",
            },
        ),
        ("checkpoint_hold", {"kinlog", "the same bytes, one sync", "full-state stand-in"}),
    ],
)
def test_bench_runs_and_compares_all_contenders(name, contenders, tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCH / f"{name}.py"),
            *("--smoke", "--directory", str(tmp_path), "--json", str(report)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    comparisons = msgspec.json.decode(report.read_bytes())["comparisons"]
    assert set(comparisons[0]["costs"]) == contenders
    assert all(one["case"] in done.stdout for one in comparisons)
