"""The dataset: a seeded mixture of reasoning-gym tasks, addressed by sample index and scored by their own verifiers."""

import hashlib
import importlib.metadata
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from kinlog.schemas.errors import ConfigError, DatasetError
from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.settings import DatasetSettings, TaskSettings

__all__ = ["Item", "TaskMixture"]

#: Terse prompts, rendered from the entry's metadata: a model of random weights and a small alphabet cannot afford the
#: generator's English. Scoring is the generator's own. Generators that are not here show their question.
_TERSE_PROMPTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "chain_sum": lambda metadata: f"s{metadata['expression'].replace(' ', '')}=",
    "count_bits": lambda metadata: f"b{metadata['number']}=",
    "gcd": lambda metadata: f"g{','.join(map(str, metadata['numbers']))}=",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One row of the dataset, as a rollout needs it."""

    sample_id: str
    """The row's name: opaque, resolved by :meth:`TaskMixture.resolve`."""
    sample_index: int
    task_name: str
    agent_name: str
    prompt: str
    content_digest: bytes
    """BLAKE2b-128 of the prompt and of what an answer is verified against."""


class TaskMixture:
    """A map-style dataset of ``settings.size`` rows; which task and row an index stands for depends on nothing else.

    Tasks alternate by their shares: with shares 2 and 1, indices 0, 1, 2, 3, ... are tasks A, A, B, A, ...

    Parameters
    ----------
    settings:
        Size, seed and tasks.

    Raises
    ------
    ConfigError
        Task names repeat, a generator does not exist, or its options do not fit.
    """

    def __init__(self, settings: DatasetSettings) -> None:
        names = [task.name for task in settings.tasks]
        if len(set(names)) != len(names):
            raise ConfigError(f"dataset.tasks: expected distinct names, found {names}")
        self._settings = settings
        self._share_ends = list(accumulate(task.share for task in settings.tasks))
        self._datasets = [self._generate(task) for task in settings.tasks]
        self._indices = {self._sample_id(index): index for index in range(settings.size)}
        definition = {
            "size": settings.size,
            "seed": settings.seed,
            "tasks": settings.tasks,
            "reasoning_gym": importlib.metadata.version("reasoning-gym"),
        }
        self.fingerprint = digest_bytes(msgspec.json.encode(definition, order="deterministic")).hex()
        """Digest (hex) of the definition: the settings that decide rows, and the version of the generators."""

    def __len__(self) -> int:
        return self._settings.size

    def __getitem__(self, sample_index: int) -> Item:
        """Return the row at ``sample_index``.

        Raises
        ------
        IndexError
            The index is not in ``[0, size)``.
        """
        task_index, _ = self._place(sample_index)
        task = self._settings.tasks[task_index]
        entry = self._entry(sample_index)
        terse = _TERSE_PROMPTS.get(task.generator)
        prompt = terse(entry["metadata"]) if terse else str(entry["question"])
        return Item(
            sample_id=self._sample_id(sample_index),
            sample_index=sample_index,
            task_name=task.name,
            agent_name=task.agent,
            prompt=prompt,
            content_digest=digest_bytes(prompt.encode(), str(entry["answer"]).encode()),
        )

    def resolve(self, sample_id: str) -> Item:
        """Return the row of that name.

        Raises
        ------
        DatasetError
            The dataset has no such row.
        """
        if sample_id not in self._indices:
            raise DatasetError(
                f"sample {sample_id!r} is not in the dataset of {len(self)} rows with fingerprint {self.fingerprint}"
            )
        return self[self._indices[sample_id]]

    def score(self, item: Item, answer: str) -> float:
        """Return the task's own verdict on ``answer``: 1 is right, between 0 and 1 is its partial credit."""
        task_index, _ = self._place(item.sample_index)
        return float(self._datasets[task_index].score_answer(answer, self._entry(item.sample_index)))

    def _place(self, sample_index: int) -> tuple[int, int]:
        """Return which task the index stands for, and which of that task's rows."""
        if not 0 <= sample_index < self._settings.size:
            raise IndexError(f"sample index {sample_index} is not in [0, {self._settings.size})")
        cycle, place = divmod(sample_index, self._share_ends[-1])
        task_index = bisect_right(self._share_ends, place)
        share = self._settings.tasks[task_index].share
        return task_index, cycle * share + place - (self._share_ends[task_index] - share)

    def _sample_id(self, sample_index: int) -> str:
        task_index, row = self._place(sample_index)
        return f"{self._settings.tasks[task_index].name}/{row}"

    def _entry(self, sample_index: int) -> Any:
        task_index, row = self._place(sample_index)
        return self._datasets[task_index][row]

    def _generate(self, task: TaskSettings) -> Any:
        # Not at the top: importing it takes a second, and a process that only names the class needs none of it.
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if task.generator not in DATASETS:
            raise ConfigError(
                f"dataset.tasks: expected a reasoning-gym generator, found {task.generator!r} in task {task.name!r}"
            )
        # Generators seed row i with seed + i: seeds that were close together would share most of their rows.
        digest = hashlib.blake2b(f"{self._settings.seed} {task.name}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")
        rows = (self._settings.size // self._share_ends[-1] + 1) * task.share
        try:
            return reasoning_gym.create_dataset(task.generator, seed=seed, size=rows, **task.options)
        except (TypeError, AssertionError) as error:
            raise ConfigError(
                f"dataset.tasks: the options of task {task.name!r} do not fit {task.generator}: {error}"
            ) from error
