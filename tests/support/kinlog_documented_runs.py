"""The runs that the documents' commands name, prepared in a directory as the documents lay it out.

Run as a program, with the directory as its argument: the runs' controllers are then gone, as after a kill.
"""

import asyncio
import sys
from pathlib import Path

from kinlog_fake_parts import FakeParts
from kinlog_lives import first_life, next_life, run_config

#: As in the guide.
_CONFIG = run_config(
    trainer__max_steps=20,
    trainer__groups_per_step=4,
    sampler__name="in_order",
    rollout__num_generations=8,
    rollout__max_live_groups=12,
    rollout__max_inflight_siblings=64,
    checkpointing__every_steps=5,
)


async def prepare_runs(directory: Path) -> None:
    """Make ``runs/first``, killed in its second life past step 16, and ``runs/second``, killed past step 11."""
    for name, deaths in (("first", (13, 17)), ("second", (12,))):
        path = directory / "runs" / name
        for life_number, step in enumerate(deaths):
            begin = next_life if life_number else first_life
            life = await begin(path, _CONFIG, FakeParts())
            await life.train_until(lambda p, step=step: p.train_step >= step)
            await life.kill()


if __name__ == "__main__":
    asyncio.run(prepare_runs(Path(sys.argv[1])))
