"""A run of two lives with checkpoints, and its log compacted: what readers of every kind are tried on."""

from pathlib import Path

from kinlog_run_fixtures import Chance, DiskRun

from kinlog.lineage.compaction import Compaction, compact_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.checkpoints import read_manifest

__all__ = ["OLDEST_KEPT", "LAST", "compact_two_lives", "two_lives"]

OLDEST_KEPT, LAST = "step_000009", "step_000012"


def two_lives(path: Path, *, through_step: int = 12) -> DiskRun:
    """Return a run with a checkpoint every three steps: killed after step 7, and gone on from step 6. It is alive."""
    run = DiskRun(path, segment_bytes=65_536)
    chance = Chance(run, 5, permits=8)
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    run.kill()
    run.restart()
    chance.live(through_step=through_step, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.position()
    return run


def compact_two_lives(run: DiskRun, *, drop: bool) -> Compaction:
    """Compact the run's log; ``drop``: and let go of what is behind the older of the two checkpoints that are kept."""
    kept = [read_manifest(run.directory.checkpoints / name).position for name in (OLDEST_KEPT, LAST)]
    return compact_log(
        LocalStore(),
        run.directory.log,
        epoch=2,
        checkpoints=kept,
        drop_through_seq=kept[0].seq if drop else 0,
    )
