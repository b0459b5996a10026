"""A simulated run of a few thousand groups: its log stays small, whether history is kept or dropped."""

from retention import simulate

SEGMENT_BYTES = 128 * 1024
GROUPS = 1200


def test_what_is_not_compacted_is_bounded_and_the_archive_is_small(tmp_path):
    run = simulate(tmp_path / "log", GROUPS, segment_bytes=SEGMENT_BYTES, drop=False)
    assert run.events > 20_000
    assert run.archived_events > run.events / 2
    assert max(sizes.live for sizes in run.sizes) <= 5 * SEGMENT_BYTES
    assert run.sizes[-1].archive / run.archived_events <= 40


def test_everything_is_bounded_when_history_is_dropped(tmp_path):
    run = simulate(tmp_path / "log", GROUPS, segment_bytes=SEGMENT_BYTES, drop=True)
    half = len(run.sizes) // 2
    largest = max(sizes.total for sizes in run.sizes[:half])
    assert max(sizes.total for sizes in run.sizes[half:]) <= 1.5 * largest
