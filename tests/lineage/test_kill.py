"""A real process is killed while it appends: what it said was acknowledged is there afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from kinlog_builders import numbered

from kinlog.lineage.scan import scan_log

SUPPORT = Path(sys.modules["kinlog_builders"].__file__).parent
LIVES = 4


def life_and_death(directory: Path, appends: int) -> int:
    """Let a child append so often, kill it, and return the last seq that it said was acknowledged."""
    child = subprocess.Popen(
        [sys.executable, str(SUPPORT / "kinlog_append_child.py"), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "ready\n"
        said = [child.stdout.readline() for _ in range(appends)]
        os.kill(child.pid, signal.SIGKILL)
        said += [line for line in child.stdout if line.endswith("\n")]
        acknowledged = int(said[-1])
    assert child.returncode == -signal.SIGKILL
    return acknowledged


def test_every_acknowledged_event_survives_kills_of_a_real_process(tmp_path):
    directory = tmp_path / "log"
    for life in range(1, LIVES + 1):
        acknowledged = life_and_death(directory, 40 * life)
        scan = scan_log(directory)
        records = list(scan.events())
        assert len(records) == scan.end.seq >= acknowledged
        assert [r.seq for r in records] == list(range(1, len(records) + 1))
        assert [r.event for r in records] == [numbered(r.seq) for r in records]
        assert records[-1].epoch == life
