from collections import Counter

import msgspec
import pytest

from kinlog.schemas.errors import ConfigError, DatasetError
from kinlog.schemas.settings import DatasetSettings, TaskSettings
from kinlog.workers.tasks import TaskMixture

pytest_plugins = ["kinlog_policy_fixtures"]


def test_rows_depend_on_the_index_alone(mixture, dataset_settings):
    backwards = TaskMixture(dataset_settings)
    assert [mixture[index] for index in range(30)] == [backwards[index] for index in range(29, -1, -1)][::-1]


def test_tasks_alternate_by_their_shares(mixture):
    names = [mixture[index].task_name for index in range(6)]
    assert names == ["divisors", "divisors", "bits", "divisors", "divisors", "bits"]


def test_no_two_indices_share_a_sample_id(mixture):
    counts = Counter(mixture[index].sample_id for index in range(len(mixture)))
    assert len(counts) == 30


def test_prompt_is_terse_and_scored_by_the_generators_own_verifier(mixture):
    item = mixture[2]
    number = int(item.prompt.removeprefix("b").removesuffix("="))
    right = str(number.bit_count())
    assert mixture.score(item, right) == 1.0
    assert 0 < mixture.score(item, right + "--") < 1
    assert mixture.score(item, "") == 0.0


def test_generator_without_terse_prompt_shows_its_question():
    task = TaskSettings(name="products", generator="products", agent="single_turn")
    item = TaskMixture(DatasetSettings(size=1, tasks=(task,)))[0]
    assert "multiplication" in item.prompt


def test_row_is_resolved_by_name_with_the_same_content(mixture):
    assert mixture.resolve(mixture[5].sample_id) == mixture[5]


def test_unknown_sample_is_refused_by_name(mixture):
    with pytest.raises(DatasetError, match="bits/999"):
        mixture.resolve("bits/999")


def test_index_outside_the_dataset_is_refused(mixture):
    for index in (-1, 30):
        with pytest.raises(IndexError, match=str(index)):
            mixture[index]


def test_fingerprint_follows_the_definition(mixture, dataset_settings):
    assert TaskMixture(dataset_settings).fingerprint == mixture.fingerprint
    for change in ({"seed": 2}, {"size": 31}, {"tasks": dataset_settings.tasks[::-1]}):
        assert (
            TaskMixture(msgspec.structs.replace(dataset_settings, **change)).fingerprint
            != mixture.fingerprint
        )


def test_fingerprint_ignores_how_often_the_dataset_is_passed(mixture, dataset_settings):
    longer = msgspec.structs.replace(dataset_settings, max_epochs=9)
    assert TaskMixture(longer).fingerprint == mixture.fingerprint


def test_content_digest_changes_with_the_row(mixture):
    assert len({mixture[index].content_digest for index in range(30)}) == len(
        {mixture[index].prompt for index in range(30)}
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TaskSettings(name="x", generator="no_such_task", agent="retry"), "no_such_task"),
        (TaskSettings(name="x", generator="gcd", agent="retry", options={"colour": 1}), "colour"),
        (TaskSettings(name="x", generator="gcd", agent="retry", options={"min_value": -4}), "task 'x'"),
    ],
)
def test_bad_task_is_refused_by_name(task, message):
    with pytest.raises(ConfigError, match=message):
        TaskMixture(DatasetSettings(size=4, tasks=(task,)))


def test_repeated_task_name_is_refused(dataset_settings):
    with pytest.raises(ConfigError, match="distinct names"):
        TaskMixture(msgspec.structs.replace(dataset_settings, tasks=dataset_settings.tasks * 2))
