"""The draw order: the same in every life, every row once a dataset epoch, and refused when the dataset is another one."""

from contextlib import suppress

import msgspec
import pytest
from kinlog_fake_parts import FakeDataset, FakeItem

from kinlog.controller.prompt_source import PromptSource
from kinlog.schemas.errors import DatasetError


def drawn(source: PromptSource, draws: range) -> list[str]:
    prompts = [source.draw(index) for index in draws]
    assert None not in prompts
    return [prompt.sample_id for prompt in prompts if prompt is not None]


def test_every_row_is_drawn_once_in_each_dataset_epoch():
    source = PromptSource(FakeDataset(size=17), seed=3, max_epochs=4)
    for epoch in range(4):
        rows = drawn(source, range(17 * epoch, 17 * (epoch + 1)))
        assert sorted(rows) == sorted(f"row-{n}" for n in range(17))
        assert {source.draw(17 * epoch + n).dataset_epoch for n in (0, 16)} == {epoch}


def test_order_differs_between_epochs_and_between_seeds():
    source, other = (PromptSource(FakeDataset(size=32), seed=seed, max_epochs=3) for seed in (1, 2))
    orders = [drawn(source, range(32 * n, 32 * (n + 1))) for n in range(3)] + [drawn(other, range(32))]
    assert len({tuple(order) for order in orders}) == 4


def test_order_of_a_seed_is_fixed_for_ever():
    """Another process, another release: a run that is resumed there must draw what it would have drawn."""
    source = PromptSource(FakeDataset(size=8), seed=7, max_epochs=2)
    expected = [1, 7, 2, 3, 6, 5, 0, 4, 6, 7, 4, 1, 0, 5, 3, 2]
    assert [int(row.removeprefix("row-")) for row in drawn(source, range(16))] == expected


def test_draws_may_be_asked_for_in_any_order():
    forward, backward = (PromptSource(FakeDataset(size=5), seed=0, max_epochs=3) for _ in range(2))
    assert [forward.draw(n) for n in range(15)] == [backward.draw(n) for n in reversed(range(15))][::-1]


def test_source_is_exhausted_after_its_last_epoch():
    source = PromptSource(FakeDataset(size=5), seed=0, max_epochs=2)
    assert source.has(9)
    assert not source.has(10)
    assert source.draw(9) is not None
    assert source.draw(10) is None
    assert source.draw(11) is None


def test_dataset_without_rows_is_refused():
    with pytest.raises(DatasetError, match="no rows"):
        PromptSource(FakeDataset(size=0), seed=0, max_epochs=1)


def test_prompt_says_what_was_drawn_and_whence():
    dataset = FakeDataset(size=5)
    prompt = PromptSource(dataset, seed=0, max_epochs=2).draw(7)
    assert prompt is not None
    item = dataset.resolve(prompt.sample_id)
    assert (prompt.draw_index, prompt.dataset_epoch) == (7, 1)
    assert prompt.dataset_fingerprint == dataset.fingerprint
    assert (prompt.task_name, prompt.agent_name) == (item.task_name, item.agent_name)
    assert prompt.content_digest == item.content_digest


def test_unchanged_prompt_is_accepted():
    source = PromptSource(FakeDataset(), seed=0, max_epochs=1)
    prompt = source.draw(3)
    assert prompt is not None
    PromptSource(FakeDataset(), seed=0, max_epochs=1).check(prompt)


def test_changed_content_is_refused_by_name_with_both_digests():
    prompt = PromptSource(FakeDataset(), seed=0, max_epochs=1).draw(3)
    assert prompt is not None
    changed = FakeDataset(salt="changed")
    with pytest.raises(DatasetError) as caught:
        PromptSource(changed, seed=0, max_epochs=1).check(prompt)
    assert repr(prompt.sample_id) in str(caught.value)
    assert prompt.content_digest.hex() in str(caught.value)
    assert changed.resolve(prompt.sample_id).content_digest.hex() in str(caught.value)


def test_row_that_is_gone_is_refused_by_name():
    prompt = PromptSource(FakeDataset(), seed=0, max_epochs=1).draw(3)
    assert prompt is not None
    gone = msgspec.structs.replace(prompt, sample_id="row-gone")
    with pytest.raises(DatasetError, match="row-gone"):
        PromptSource(FakeDataset(), seed=0, max_epochs=1).check(gone)


def test_dataset_with_another_fingerprint_is_refused_with_both():
    prompt = PromptSource(FakeDataset(size=64), seed=0, max_epochs=1).draw(3)
    assert prompt is not None
    other = FakeDataset(size=65)
    with pytest.raises(DatasetError, match=f"{prompt.dataset_fingerprint}.*{other.fingerprint}"):
        PromptSource(other, seed=0, max_epochs=1).check(prompt)


def test_sample_ids_that_look_alike_stay_what_they_are():
    class Twins(FakeDataset):
        names = ("a:b", "a_b", "a/b", "e\u0301", "\u00e9", "x" * 300)

        def __len__(self) -> int:
            return len(self.names)

        def __getitem__(self, index: int, /) -> FakeItem:
            return msgspec.structs.replace(super().__getitem__(index), sample_id=self.names[index])

    source = PromptSource(Twins(), seed=0, max_epochs=1)
    assert sorted(drawn(source, range(6))) == sorted(Twins.names)


class Twins(FakeDataset):
    """Rows 0 and 1 have one sample id."""

    def __getitem__(self, index: int, /) -> FakeItem:
        item = super().__getitem__(index)
        return msgspec.structs.replace(item, sample_id="twin") if index < 2 else item


def refused_draw(source: PromptSource, size: int) -> int:
    """Return the draw that is refused for its sample id."""
    for draw in range(size):
        with suppress(DatasetError):
            source.draw(draw)
            continue
        return draw
    raise AssertionError("none was refused")


@pytest.mark.parametrize("seed", range(6))
def test_row_whose_sample_id_belongs_to_another_is_refused_in_whatever_life_it_is_drawn(seed: int):
    draw = refused_draw(PromptSource(Twins(size=4), seed=seed, max_epochs=1), 4)
    later_life = PromptSource(Twins(size=4), seed=seed, max_epochs=1)
    with pytest.raises(DatasetError, match="same sample id 'twin'"):
        later_life.draw(draw)


@pytest.mark.parametrize("seed", range(6))
def test_restored_prompt_is_looked_up_where_it_was_drawn_and_not_by_a_name_that_two_rows_have(seed: int):
    source = PromptSource(Twins(size=4), seed=seed, max_epochs=2)
    refused = refused_draw(source, 4)
    prompts = [source.draw(draw) for draw in range(4) if draw != refused]
    later_life = PromptSource(Twins(size=4), seed=seed, max_epochs=2)
    for prompt in prompts:
        assert prompt is not None
        later_life.check(prompt)


def test_row_that_is_there_twice_is_one_row():
    class Repeated(FakeDataset):
        def __getitem__(self, index: int, /) -> FakeItem:
            return super().__getitem__(index // 2)

    source = PromptSource(Repeated(size=6), seed=0, max_epochs=1)
    assert sorted(drawn(source, range(6))) == sorted(f"row-{n // 2}" for n in range(6))


def test_restored_prompt_of_another_draw_order_is_refused_with_what_is_drawn_there_now():
    prompt = PromptSource(FakeDataset(), seed=0, max_epochs=1).draw(3)
    now = PromptSource(FakeDataset(), seed=1, max_epochs=1)
    found = now.draw(3)
    assert prompt is not None
    assert found is not None
    with pytest.raises(
        DatasetError, match=rf"draw 3 was sample '{prompt.sample_id}', found sample '{found.sample_id}'"
    ):
        now.check(prompt)
