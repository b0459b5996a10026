"""Drawing prompts: the dataset in a seeded order, epoch after epoch, by a cursor that the log owns."""

import hashlib

from kinlog.controller.protocols import Dataset
from kinlog.schemas.errors import DatasetError
from kinlog.schemas.prompts import PromptRef

__all__ = ["PromptSource"]


class PromptSource:
    """The draw order of a run. Draw ``i`` is the same prompt in every life of the run.

    Parameters
    ----------
    dataset:
        A map-style dataset.
    seed:
        Orders the rows of each dataset epoch.
    max_epochs:
        The source is exhausted after this many passes.
    """

    def __init__(self, dataset: Dataset, *, seed: int, max_epochs: int) -> None:
        if len(dataset) == 0:
            raise DatasetError("the dataset has no rows")
        self._dataset = dataset
        self._seed = seed
        self._max_epochs = max_epochs
        self._order_epoch = -1
        self._order: list[int] = []

    @property
    def total_draws(self) -> int:
        return len(self._dataset) * self._max_epochs

    def draw(self, draw_index: int) -> PromptRef | None:
        """Return the prompt of a draw, ``None`` when the dataset is exhausted."""
        if draw_index >= self.total_draws:
            return None
        dataset_epoch, place = divmod(draw_index, len(self._dataset))
        item = self._dataset[self._order_of(dataset_epoch)[place]]
        return PromptRef(
            dataset_fingerprint=self._dataset.fingerprint,
            sample_id=item.sample_id,
            draw_index=draw_index,
            dataset_epoch=dataset_epoch,
            task_name=item.task_name,
            agent_name=item.agent_name,
            content_digest=item.content_digest,
        )

    def check(self, prompt: PromptRef) -> None:
        """Resolve a restored prompt again.

        Raises
        ------
        DatasetError
            The dataset is another one, the row is gone, or its content has changed.
        """
        if prompt.dataset_fingerprint != self._dataset.fingerprint:
            raise DatasetError(
                f"draw {prompt.draw_index} is from the dataset with fingerprint {prompt.dataset_fingerprint}, "
                f"found {self._dataset.fingerprint}: restore the dataset's settings and version, or start a new run"
            )
        found = self._dataset.resolve(prompt.sample_id).content_digest
        if found != prompt.content_digest:
            raise DatasetError(
                f"sample {prompt.sample_id!r} has changed since it was drawn: expected content digest "
                f"{prompt.content_digest.hex()}, found {found.hex()}: restore the dataset, or start a new run"
            )

    def _order_of(self, dataset_epoch: int) -> list[int]:
        if dataset_epoch != self._order_epoch:
            # Sorted by a digest rather than shuffled: the order must not depend on a library's version.
            def rank(index: int) -> bytes:
                key = b"".join(n.to_bytes(8, "little") for n in (self._seed, dataset_epoch, index))
                return hashlib.blake2b(key, digest_size=8).digest()

            self._order = sorted(range(len(self._dataset)), key=rank)
            self._order_epoch = dataset_epoch
        return self._order
