"""What the benches share: contenders take turns, ratios are of the same round, and a missed target is said."""

import msgspec
import pytest
from measure import Report, Setup, compare, run_bench, spread_of, take_turns


def test_every_contender_runs_once_a_round_and_another_one_begins_each():
    order = []
    costs = take_turns(
        {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}, rounds=3
    )
    assert "".join(order) == "abc" + "bca" + "cab"
    assert costs == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_ratios_are_of_the_same_round():
    # A slow moment that hits both in one round is no difference between them.
    comparison = compare("case", "ms", {"ours": [1, 100, 1], "theirs": [2, 200, 2]})
    assert comparison.ratios["theirs"] == spread_of([2, 2, 2])
    assert comparison.costs["ours"].median == 1


def test_spread_is_the_median_and_the_tenths():
    spread = spread_of([float(value) for value in range(11)])
    assert (spread.median, spread.p10, spread.p90, spread.rounds) == (5, 1, 9, 11)
    assert spread_of([3.0]).p90 == 3


@pytest.mark.parametrize(
    ("aims", "met"),
    [
        ({"at_least": {"theirs": 2}}, True),
        ({"at_least": {"theirs": 2.1}}, False),
        ({"at_most": 10}, True),
        ({"at_most": 9}, False),
        ({"at_least": {"theirs": 2}, "at_most": 9}, False),
    ],
)
def test_target_is_met_by_the_medians_or_missed(aims, met):
    assert compare("case", "ms", {"ours": [10], "theirs": [20]}, **aims).met is met


def test_bench_prints_and_writes_the_same_and_cleans_up(tmp_path, capsys):
    seen = []

    def measured(setup: Setup):
        seen.append(setup)
        (setup.directory / "big").write_bytes(b"-")
        yield compare("a case", "ms", {"ours": [2.0], "theirs": [5.0]}, at_least={"theirs": 3}, note="a note")

    target = tmp_path / "reports" / "x.json"
    report = run_bench(
        "x", "A title", measured, ["--smoke", "--json", str(target), "--directory", str(tmp_path / "scratch")]
    )
    assert msgspec.json.decode(target.read_bytes(), type=Report) == report
    printed = capsys.readouterr().out
    for text in ("A title", "a case", "2.5 x ours, at least 3 aimed at", "MISSED", "a note"):
        assert text in printed
    assert seen[0].smoke
    assert not seen[0].directory.exists()
