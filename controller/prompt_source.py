"""Drawing prompts: a map-style dataset in a seeded order, or a stream as it comes, by a cursor that the log owns."""

import hashlib
from collections.abc import Iterator

from kinlog.controller.protocols import Dataset, DatasetItem, Prompts, StreamingDataset
from kinlog.schemas.errors import DatasetError
from kinlog.schemas.prompts import PromptRef

__all__ = ["PromptSource", "StreamPromptSource", "prompts_of"]


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
        self._drawn: dict[str, int] = {}
        """Sample id -> the row that was drawn under it, in this life."""

    def has(self, draw_index: int) -> bool:
        """Whether there is such a draw: the dataset ends after its last epoch."""
        return draw_index < len(self._dataset) * self._max_epochs

    def draw(self, draw_index: int) -> PromptRef | None:
        """Return the prompt of a draw, ``None`` when the dataset is exhausted.

        Raises
        ------
        DatasetError
            Two rows have the same sample id: which of them a group was drawn from could not be told after a restart.
        """
        if not self.has(draw_index):
            return None
        dataset_epoch, place = divmod(draw_index, len(self._dataset))
        sample_index = self._order_of(dataset_epoch)[place]
        item = self._dataset[sample_index]
        if self._drawn.setdefault(item.sample_id, sample_index) != sample_index:
            raise DatasetError(
                f"rows {self._drawn[item.sample_id]} and {sample_index} of the dataset have the same sample id "
                f"{item.sample_id!r}: make sample ids unique"
            )
        return _prompt_ref(self._dataset.fingerprint, item, draw_index, dataset_epoch)

    def check(self, prompt: PromptRef) -> None:
        """Resolve a restored prompt again.

        Raises
        ------
        DatasetError
            The dataset is another one, the row is gone, or its content has changed.
        """
        _check_fingerprint(prompt, self._dataset.fingerprint)
        _check_content(prompt, self._dataset.resolve(prompt.sample_id))

    def _order_of(self, dataset_epoch: int) -> list[int]:
        if dataset_epoch != self._order_epoch:
            # Sorted by a digest rather than shuffled: the order must not depend on a library's version.
            def rank(index: int) -> bytes:
                key = b"".join(n.to_bytes(8, "little") for n in (self._seed, dataset_epoch, index))
                return hashlib.blake2b(key, digest_size=8).digest()

            self._order = sorted(range(len(self._dataset)), key=rank)
            self._order_epoch = dataset_epoch
        return self._order


class StreamPromptSource:
    """The draws of a streaming dataset: each restart opens the stream again where the log's cursor stands.

    A stream has one epoch, and no rows that could be looked up by name: a restored prompt is checked by reading the
    stream from its draw on.
    """

    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        self._stream: Iterator[DatasetItem] = iter(())
        self._next_draw = -1
        self._peeked: DatasetItem | None = None

    def has(self, draw_index: int) -> bool:
        """Whether the stream has such a draw. Reads one row ahead."""
        if self._next_draw != draw_index:
            self._stream = self._dataset.open(draw_index)
            self._peeked = next(self._stream, None)
            self._next_draw = draw_index
        return self._peeked is not None

    def draw(self, draw_index: int) -> PromptRef | None:
        """Return the prompt of a draw, ``None`` when the stream has ended."""
        if not self.has(draw_index) or self._peeked is None:
            return None
        item, self._peeked = self._peeked, next(self._stream, None)
        self._next_draw = draw_index + 1
        return _prompt_ref(self._dataset.fingerprint, item, draw_index, 0)

    def check(self, prompt: PromptRef) -> None:
        """Read a restored prompt again. Raises ``DatasetError`` as :meth:`PromptSource.check`."""
        _check_fingerprint(prompt, self._dataset.fingerprint)
        item = next(self._dataset.open(prompt.draw_index), None)
        if item is None or item.sample_id != prompt.sample_id:
            found = "the end of the stream" if item is None else f"sample {item.sample_id!r}"
            raise DatasetError(
                f"draw {prompt.draw_index} of the stream was sample {prompt.sample_id!r}, found {found}: restore the "
                "stream, or start a new run"
            )
        _check_content(prompt, item)


def prompts_of(dataset: Dataset | StreamingDataset, *, seed: int, max_epochs: int) -> Prompts:
    """Return the draw order of a dataset: ``seed`` and ``max_epochs`` are for map-style ones."""
    if isinstance(dataset, StreamingDataset):
        return StreamPromptSource(dataset)
    return PromptSource(dataset, seed=seed, max_epochs=max_epochs)


def _prompt_ref(fingerprint: str, item: DatasetItem, draw_index: int, dataset_epoch: int) -> PromptRef:
    return PromptRef(
        dataset_fingerprint=fingerprint,
        sample_id=item.sample_id,
        draw_index=draw_index,
        dataset_epoch=dataset_epoch,
        task_name=item.task_name,
        agent_name=item.agent_name,
        content_digest=item.content_digest,
    )


def _check_fingerprint(prompt: PromptRef, fingerprint: str) -> None:
    if prompt.dataset_fingerprint != fingerprint:
        raise DatasetError(
            f"draw {prompt.draw_index} is from the dataset with fingerprint {prompt.dataset_fingerprint}, "
            f"found {fingerprint}: restore the dataset's settings and version, or start a new run"
        )


def _check_content(prompt: PromptRef, item: DatasetItem) -> None:
    if item.content_digest != prompt.content_digest:
        raise DatasetError(
            f"sample {prompt.sample_id!r} has changed since it was drawn: expected content digest "
            f"{prompt.content_digest.hex()}, found {item.content_digest.hex()}: restore the dataset, or start a new run"
        )
