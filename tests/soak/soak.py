"""``make soak``: kill real runs at random moments, and see whether anything of it can be told afterwards.

python tests/soak/soak.py [--kills 50] [--seed 0] [--asynchronous] [--dir DIR]
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from kinlog_soak import judge, kill_until_done, random_targets, render, train_undisturbed, write_soak_config

#: A run takes about this many kills before it has trained its steps.
_KILLS_PER_RUN = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--asynchronous", action="store_true", help="generate ahead of training")
    parser.add_argument("--dir", type=Path, help="where the runs go; by default a temporary directory")
    chosen = parser.parse_args()
    base = chosen.dir or Path(tempfile.mkdtemp(prefix="kinlog-soak-"))
    base.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    config = write_soak_config(base / "soak.yaml", max_steps=chosen.steps, lock_step=not chosen.asynchronous)
    undisturbed = None if chosen.asynchronous else train_undisturbed(base, config)
    chance = random.Random(chosen.seed)
    victims = []
    while (done := sum(len(victim.kills) for victim in victims)) < chosen.kills:
        victim = kill_until_done(
            base,
            config,
            name=f"victim-{len(victims)}",
            chance=chance,
            targets=random_targets(chance, min(_KILLS_PER_RUN, chosen.kills - done)),
            say=lambda line: print(f"[{time.monotonic() - began:6.0f} s] {line}", flush=True),
        )
        judge(victim, undisturbed)
        victims.append(victim)
        for problem in victim.problems:
            print(f"{victim.path}: {problem}", flush=True)
    mode = "asynchronous" if chosen.asynchronous else "lock-step"
    print(f"\n{mode}, seed {chosen.seed}, {time.monotonic() - began:.0f} s, runs in {base}\n")
    print(render(victims))
    return 1 if any(victim.problems for victim in victims) else 0


if __name__ == "__main__":
    sys.exit(main())
