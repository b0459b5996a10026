"""Every phase of a start has its time: one that hangs is named, and nothing of the run was changed."""

import asyncio
from pathlib import Path

import pytest
from kinlog_fake_parts import FakeParts
from kinlog_lives import Life, first_life, run_config

from kinlog.schemas.errors import StalledError

CONFIG = run_config(supervision__start_timeout_s=0.05)


async def never(*args: object) -> None:
    await asyncio.get_running_loop().create_future()


class HangingParts(FakeParts):
    """Parts of which one does not come up."""

    def __init__(self, hangs: str) -> None:
        super().__init__()
        self._hangs = hangs
        self.prepare = self._let_trainer_hang

    def _let_trainer_hang(self, parts: FakeParts) -> None:
        if self._hangs in ("load", "publish"):
            setattr(parts.trainer, self._hangs, never)

    async def start_data_plane(self):
        if self._hangs == "start_data_plane":
            await never()
        return await super().start_data_plane()

    async def start_workers(self):
        if self._hangs == "start_workers":
            await never()
        return await super().start_workers()


PHASES = {
    "start_data_plane": "starting the data plane",
    "start_workers": "attaching the workers",
    "publish": "publishing the first weights",
}


@pytest.mark.parametrize("hangs", PHASES)
async def test_phase_of_a_start_that_hangs_is_named_and_leaves_no_run_behind(tmp_path: Path, hangs: str):
    with pytest.raises(StalledError, match=rf"{PHASES[hangs]} took longer than supervision.start_timeout_s"):
        await Life(tmp_path / "run", CONFIG, HangingParts(hangs)).begin(resume=False)
    assert not (tmp_path / "run" / "log").exists()


@pytest.mark.parametrize(
    ("hangs", "phase"),
    [
        *list(PHASES.items())[:2],
        ("load", "loading the trainer"),
        ("publish", "publishing the restored weights"),
    ],
)
async def test_phase_of_a_restart_that_hangs_is_named_and_changes_nothing(
    tmp_path: Path, hangs: str, phase: str
):
    life = await first_life(tmp_path / "run", run_config())
    await life.train_until(lambda p: bool(p.checkpoints))
    await life.kill()
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "log").rglob("*.arrows*")}
    stuck = Life(tmp_path / "run", CONFIG, HangingParts(hangs))
    with pytest.raises(StalledError, match=phase):
        await stuck.begin(resume=True)
    await stuck.controller.close(cleanly=False)
    assert before
    assert before == {path: path.read_bytes() for path in before}
    resumed = await (await Life(tmp_path / "run", run_config()).begin(resume=True)).train()
    assert resumed.p.train_step == 4


async def test_time_out_of_somebody_else_is_not_taken_for_the_start_s_own(tmp_path: Path):
    class Broken(FakeParts):
        async def start_workers(self):
            raise TimeoutError("a worker's own")

    with pytest.raises(TimeoutError, match="a worker's own"):
        await Life(tmp_path / "run", CONFIG, Broken()).begin(resume=False)
