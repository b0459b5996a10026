"""Drawing prompts: a map-style dataset in a seeded order, or a stream as it comes, by a cursor that the log owns."""

import asyncio
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

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

    async def prepare(self, draw_index: int) -> None:
        """Return at once: any row can be looked up."""

    def has(self, draw_index: int) -> bool:
        """Whether there is such a draw: the dataset ends after its last epoch."""
        return draw_index < len(self._dataset) * self._max_epochs

    def draw(self, draw_index: int) -> PromptRef | None:
        """Return the prompt of a draw, ``None`` when the dataset is exhausted.

        Raises
        ------
        DatasetError
            The row's sample id belongs to another row as well, and a worker that looks it up gets that one. Judged by
            the dataset alone, so that it is refused in whatever life it is drawn.
        """
        if not self.has(draw_index):
            return None
        sample_index, item = self._item_of(draw_index)
        found = self._dataset.resolve(item.sample_id)
        if _contents(found) != _contents(item):
            raise DatasetError(
                f"row {sample_index} of the dataset and another row have the same sample id {item.sample_id!r}: make "
                "sample ids unique"
            )
        return _prompt_ref(self._dataset.fingerprint, item, draw_index, draw_index // len(self._dataset))

    def check(self, prompt: PromptRef) -> None:
        """Look a restored prompt up again, where it was drawn.

        Raises
        ------
        DatasetError
            The dataset is another one or is drawn in another order, the row is gone, or its content has changed.
        """
        _check_fingerprint(prompt, self._dataset.fingerprint)
        _check_same(prompt, self._item_of(prompt.draw_index)[1])

    def _item_of(self, draw_index: int) -> tuple[int, DatasetItem]:
        dataset_epoch, place = divmod(draw_index, len(self._dataset))
        sample_index = self._order_of(dataset_epoch)[place]
        return sample_index, self._dataset[sample_index]

    def _order_of(self, dataset_epoch: int) -> list[int]:
        if dataset_epoch != self._order_epoch:
            # Sorted by a digest rather than shuffled: the order must not depend on a library's version.
            def rank(index: int) -> bytes:
                key = b"".join(n.to_bytes(8, "little") for n in (self._seed, dataset_epoch, index))
                return hashlib.blake2b(key, digest_size=8).digest()

            self._order = sorted(range(len(self._dataset)), key=rank)
            self._order_epoch = dataset_epoch
        return self._order


class _ReadAhead(NamedTuple):
    """What a stream gave for a draw."""

    draw_index: int
    item: DatasetItem | None
    """``None``: the stream has ended."""


class StreamPromptSource:
    """The draws of a streaming dataset: each restart opens the stream again where the log's cursor stands.

    A stream has one epoch, and no rows that could be looked up by name: a restored prompt is checked by reading the
    stream from its draw on. Each draw is read ahead, in a thread: a stream that is slow holds up nothing but draws.
    """

    def __init__(self, dataset: StreamingDataset) -> None:
        self._dataset = dataset
        self._stream: Iterator[DatasetItem] = iter(())
        self._next_draw = -1
        """The draw that the open stream gives next."""
        self._ahead: _ReadAhead | None = None

    async def prepare(self, draw_index: int) -> None:
        """Read a draw ahead, unless that has been done."""
        if self._ahead is None or self._ahead.draw_index != draw_index:
            self._ahead = await asyncio.to_thread(self._read, draw_index)

    def has(self, draw_index: int) -> bool:
        """Whether the stream has such a draw, as far as it has been read."""
        return self._ahead is None or self._ahead.draw_index != draw_index or self._ahead.item is not None

    def draw(self, draw_index: int) -> PromptRef | None:
        """Return the prompt of a draw that was prepared, ``None`` when the stream has ended."""
        if self._ahead is None or self._ahead.draw_index != draw_index:
            raise RuntimeError(f"draw {draw_index} of the stream was not prepared")
        item = self._ahead.item
        return None if item is None else _prompt_ref(self._dataset.fingerprint, item, draw_index, 0)

    def check(self, prompt: PromptRef) -> None:
        """Read a restored prompt again. Raises ``DatasetError`` as :meth:`PromptSource.check`."""
        _check_fingerprint(prompt, self._dataset.fingerprint)
        _check_same(prompt, next(self._dataset.open(prompt.draw_index), None))

    def _read(self, draw_index: int) -> _ReadAhead:
        if self._next_draw != draw_index:
            self._stream = self._dataset.open(draw_index)
        item = next(self._stream, None)
        self._next_draw = draw_index + 1
        return _ReadAhead(draw_index, item)


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


def _contents(item: DatasetItem) -> tuple[bytes, str, str]:
    return item.content_digest, item.task_name, item.agent_name


def _check_fingerprint(prompt: PromptRef, fingerprint: str) -> None:
    if prompt.dataset_fingerprint != fingerprint:
        raise DatasetError(
            f"draw {prompt.draw_index} is from the dataset with fingerprint {prompt.dataset_fingerprint}, "
            f"found {fingerprint}: restore the dataset's settings and version, or start a new run"
        )


def _check_same(prompt: PromptRef, item: DatasetItem | None) -> None:
    """Compare a restored prompt with what its draw gives now, if anything."""
    if item is None or item.sample_id != prompt.sample_id:
        found = "the end of the dataset" if item is None else f"sample {item.sample_id!r}"
        raise DatasetError(
            f"draw {prompt.draw_index} was sample {prompt.sample_id!r}, found {found}: restore the dataset and "
            "dataset.seed, or start a new run"
        )
    if item.content_digest != prompt.content_digest:
        raise DatasetError(
            f"sample {prompt.sample_id!r} has changed since it was drawn: expected content digest "
            f"{prompt.content_digest.hex()}, found {item.content_digest.hex()}: restore the dataset, or start a new run"
        )
