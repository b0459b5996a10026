"""The names of a log's files say what stands for what."""

import pytest

from kinlog.lineage.names import base_name, compacted_name, current_files, log_files
from kinlog.lineage.segment import segment_name


def names(files) -> list[str]:
    return [file.name for file in files]


def test_files_sort_in_the_order_of_history():
    expected = [
        base_name((2, 1)),
        compacted_name((2, 2), (4, 0)),
        segment_name(4, 1),
        segment_name(10, 0),
    ]
    assert names(log_files(sorted(expected, reverse=True))) == expected


@pytest.mark.parametrize(
    "name",
    [
        "writer.lock",
        "trash",
        ".building.compacted-00000001-00000000-00000001-00000000.arrows",
        "compacted-00000001-00000000-00000001-00000000.arrow",
        "compacted-1-0-1-0.arrows",
        "compacted-00000001-00000000-00000001.arrows",
        "compacted-00000001-00000000-00000001-00000000.copy.arrows",
        "base-00000001-00000000.arrows",
        "segment-00000001-00000000.kinlog",
    ],
)
def test_other_names_are_no_files_of_a_log(name):
    assert log_files([name]) == []


def test_what_another_file_stands_for_is_not_current():
    wide, narrow = compacted_name((2, 0), (5, 1)), compacted_name((2, 0), (3, 0))
    inside = [segment_name(2, 0), segment_name(5, 1), segment_name(4, 77), narrow]
    outside = [segment_name(1, 9), segment_name(5, 2)]
    current, replaced = current_files(log_files([*inside, *outside, wide]))
    assert sorted(names(current)) == sorted([wide, *outside])
    assert sorted(names(replaced)) == sorted(inside)


def test_a_base_stands_for_everything_before_it_older_bases_included():
    inside = [base_name((1, 0)), compacted_name((1, 1), (2, 0)), segment_name(3, 0)]
    current, replaced = current_files(log_files([*inside, base_name((3, 0)), segment_name(3, 1)]))
    assert names(current) == [base_name((3, 0)), segment_name(3, 1)]
    assert sorted(names(replaced)) == sorted(inside)
