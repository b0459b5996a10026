"""The soak in its short form: a run in lock-step that is killed at random moments cannot be told from one that is not."""

import random
from pathlib import Path

from kinlog_soak import judge, kill_until_done, train_undisturbed, write_soak_config


def test_run_that_is_killed_again_and_again_ends_with_the_very_weights_of_one_that_is_not(tmp_path: Path):
    config = write_soak_config(tmp_path / "soak.yaml", max_steps=6, lock_step=True)
    undisturbed = train_undisturbed(tmp_path, config)
    victim = kill_until_done(tmp_path, config, name="victim", chance=random.Random(11), max_kills=5)
    judge(victim, undisturbed)
    told = f"kills: {victim.kills}"
    assert len(victim.kills) == 5, told
    assert victim.problems == [], told
    assert (victim.weights_equal, victim.sealed_regenerated) == (True, 0), told
