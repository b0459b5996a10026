"""The soak in its short form: every part of a run is killed once, and nothing of it can be told afterwards."""

import random
from pathlib import Path

import pytest
from kinlog_soak import TARGETS, judge, kill_until_done, render, train_undisturbed, write_soak_config

pytestmark = pytest.mark.e2e


def test_run_whose_every_part_is_killed_ends_with_the_very_weights_of_one_that_nobody_kills(tmp_path: Path):
    config = write_soak_config(tmp_path / "soak.yaml", max_steps=40, lock_step=True)
    undisturbed = train_undisturbed(tmp_path, config)
    chance = random.Random(3)
    targets = chance.sample(list(TARGETS), len(TARGETS))
    victim = kill_until_done(tmp_path, config, name="victim", chance=chance, targets=targets)
    judge(victim, undisturbed)
    told = f"{victim.kills}\n{render([victim])}"
    assert [kill.target for kill in victim.kills] == targets, told
    assert victim.problems == [], told
    assert victim.weights_equal, told
