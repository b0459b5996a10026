"""The views say what the log says: what they have agrees with the fold, the audit's account, and a plain reading of events."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import Story
from kinlog_compaction import LOG, MortalStore, compacted, live, told_life
from kinlog_golden import READABLE, log_path
from kinlog_run_fixtures import small_run
from kinlog_view_oracle import Row, ViewOracle

from kinlog.lineage import reading
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.replay.lives import LivesTally
from kinlog.replay.rendering import to_json_value
from kinlog.replay.views.catalogue import VIEWS
from kinlog.replay.views.reading import read_view, read_views, view_table
from kinlog.schemas import events as e
from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.reasons import Reason

TIMES = pa.timestamp("us", tz="UTC")


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is recorded of a group is spread over several batches."""
    monkeypatch.setattr(reading, "_JOINED_ROWS", 40)


def log_of(*seeds: int, store: MortalStore | None = None) -> LogScan:
    """A log of a life for each seed, the last one still open."""
    store = MortalStore() if store is None else store
    for seed in seeds:
        live(store, told_life(seed), cleanly=False)
    return scan_log(LOG, store=store)


def rows_of(scan: LogScan, name: str) -> list[Row]:
    return view_table(scan, name).to_pylist()


def all_rows(scan: LogScan) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {name: [] for name in VIEWS}
    for name, batch in read_views(scan, dict.fromkeys(VIEWS)):
        rows[name] += batch.to_pylist()
    return rows


def in_any_order(rows: list[Row]) -> list[str]:
    """Views promise no order: theirs follows the log's frames."""
    return sorted(map(repr, rows))


def check_views(scan: LogScan) -> None:
    """Everything that the views say of a log with nothing dropped."""
    oracle, rows = ViewOracle(scan), all_rows(scan)
    check_attempts(rows["attempts"], oracle)
    check_groups(rows["groups"], oracle)
    check_siblings(rows["siblings"], oracle)
    check_steps(rows["steps"], rows["step_groups"], oracle)
    check_checkpoints(rows["checkpoints"], oracle)
    check_lives(rows["lives"], scan)
    check_events(rows["events"], scan)


def check_attempts(rows: list[Row], oracle: ViewOracle) -> None:
    assert len(rows) == len(oracle.attempts)
    for row in rows:
        expected = oracle.attempts[row["group_id"], row["generation"], row["attempt"]]
        # repr: not a number is not equal to itself.
        assert {name: repr(row[name]) for name in expected} == {n: repr(v) for n, v in expected.items()}


def check_groups(rows: list[Row], oracle: ViewOracle) -> None:
    p, account = oracle.p, oracle.account
    assert sorted(row["group_id"] for row in rows) == list(range(p.drawn_total))
    for row in rows:
        group_id, group = row["group_id"], p.groups.get(row["group_id"])
        assert row["phase"] == oracle.phase_of(group_id), group_id
        own = [a for a in oracle.attempts.values() if a["group_id"] == group_id]
        standing = [a for a in own if a["outcome"] == "sealed"]
        assert row["attempts"] == len(own)
        assert row["sealed_siblings"] == len(standing)
        assert row["completion_tokens"] == sum(a["completion_tokens"] for a in standing)
        left = oracle.left.get(group_id)
        assert (row["reason"], row["left_seq"]) == ((left["reason"], left["seq"]) if left else (None, None))
        if group is not None:
            assert row["num_generations"] == group.num_generations
            assert row["granularity"] == group.granularity.value
            assert row["sample_id"] == group.prompt.sample_id
            assert row["draw_index"] == group.prompt.draw_index
            assert row["finalized_seq"] == (group.finalized_seq or None)
            assert row["applied_step"] == (group.claimed_step if row["phase"] == "applied" else None)
            assert group.rolled_back <= (row["times_undone"] > 0)
    by_reason = [row["reason"] for row in rows if row["phase"] == "dropped"]
    assert {reason.value: n for reason, n in p.dropped.items()} == {r: by_reason.count(r) for r in by_reason}
    assert sum(row["phase"] == "applied" for row in rows) == p.applied_total == len(account.applied_groups())


def check_siblings(rows: list[Row], oracle: ViewOracle) -> None:
    sizes = {row["group_id"]: 0 for row in rows}
    for row in rows:
        sizes[row["group_id"]] += 1
        if row["group_id"] in oracle.p.groups:
            expected = oracle.siblings_of(row["group_id"])[row["generation"]]
            assert {name: repr(row[name]) for name in expected} == {n: repr(v) for n, v in expected.items()}
    assert len(sizes) == oracle.p.drawn_total
    assert all(sizes[i] == group.num_generations for i, group in oracle.p.groups.items())


def check_steps(steps: list[Row], groups: list[Row], oracle: ViewOracle) -> None:
    assert [
        (s["train_step"], s["applied_seq"]) for s in sorted(steps, key=lambda s: s["applied_seq"])
    ] == sorted(
        ((step, seq) for step, seqs in oracle.applied.items() for seq in seqs), key=lambda one: one[1]
    )
    for step in steps:
        assert step["undone_seq"] == oracle.undone.get(step["applied_seq"])
        assert step["surviving"] == (step["undone_seq"] is None)
        assert step["num_groups"] == sum(g["applied_seq"] == step["applied_seq"] for g in groups)
    for applied in oracle.account.steps:
        own = [g for g in groups if g["surviving"] and g["train_step"] == applied.train_step]
        assert tuple(g["group_id"] for g in sorted(own, key=lambda g: g["place"])) == applied.group_ids


def check_checkpoints(rows: list[Row], oracle: ViewOracle) -> None:
    p = oracle.p
    usable = {
        (r["name"], r["train_step"]) for r in rows if r["surviving"] and r["train_step"] >= p.frontier_step
    }
    assert usable == {(c.name, c.train_step) for c in p.checkpoints}


def check_lives(found: list[Row], scan: LogScan) -> None:
    tally = LivesTally()
    for record in scan.events():
        tally.add(record)
    assert [(r["epoch"], r["first_seq"], r["last_seq"], r["ending"], r["pid"]) for r in found] == [
        (life.epoch, life.first_seq, life.last_seq, life.end.value, life.pid) for life in tally.lives()
    ]
    times = pa.array([[life.began_us, life.ended_us] for life in tally.lives()], pa.list_(TIMES)).to_pylist()
    assert [[row["began_at"], row["ended_at"]] for row in found] == times


def check_events(found: list[Row], scan: LogScan) -> None:
    for row, record in zip(found, scan.events(), strict=True):
        if isinstance(record.event, e.PassedOver):
            assert row["payload"] is None
            continue
        shown = {name: to_json_value(getattr(record.event, name)) for name in record.event.__struct_fields__}
        payload = {name: value for name, value in shown.items() if name not in ENVELOPE_FIELDS}
        assert json.loads(row["payload"]) == payload
        assert {name: row[name] for name in ENVELOPE_FIELDS} == {n: shown.get(n) for n in ENVELOPE_FIELDS}
        place = (row["seq"], row["epoch"], row["kind"])
        assert place == (record.seq, record.epoch, e.kind_of(type(record.event)))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=3))
def test_views_of_any_history_agree_with_the_fold_and_the_account(seeds):
    check_views(log_of(*seeds))


@pytest.mark.parametrize("name", [name for name in READABLE if name != "v2/dropped"])
def test_views_of_golden_logs_agree_with_the_fold_and_the_account(name):
    check_views(scan_log(log_path(name)))


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32))
def test_compaction_changes_no_row(seed):
    store = MortalStore()
    before = log_of(seed, seed + 1, seed + 2, store=store)
    rows = {name: in_any_order(found) for name, found in all_rows(before).items()}
    compacted(store)
    after = scan_log(LOG, store=store)
    assert any(segment.compacted for segment in after.segments)
    assert {name: in_any_order(found) for name, found in all_rows(after).items()} == rows


def test_all_views_of_one_pass_are_those_of_a_pass_each(tmp_path):
    small_run(tmp_path / "run").kill()
    scan = scan_log(tmp_path / "run" / "log")
    together = all_rows(scan)
    assert together == {name: rows_of(scan, name) for name in VIEWS}
    assert all(together.values()), "a view without rows compares nothing"


@pytest.mark.parametrize("name", VIEWS)
def test_column_is_the_same_whether_or_not_others_are_asked_for(name):
    scan = log_of(11)
    whole = view_table(scan, name)
    for column in VIEWS[name].names:
        assert view_table(scan, name, [column]).column(column).equals(whole.column(column)), column


@pytest.mark.parametrize("name", VIEWS)
def test_every_batch_has_the_schema_that_is_documented(name, tmp_path):
    small_run(tmp_path / "run").kill()
    schema = VIEWS[name].schema()
    for batch in read_view(scan_log(tmp_path / "run" / "log"), name):
        assert batch.schema.names == schema.names
        assert batch.schema.types == schema.types


@pytest.mark.parametrize("name", VIEWS)
def test_log_with_no_events_of_its_kind_gives_no_rows_and_the_schema(name):
    store = MortalStore()
    live(store, lambda ledger: Story(ledger))
    table = view_table(scan_log(LOG, store=store), name)
    assert table.schema == VIEWS[name].schema()
    assert (table.num_rows > 0) == (name in ("events", "lives"))


def test_only_payloads_of_wanted_columns_are_decoded(monkeypatch):
    scan = log_of(5)
    decoded: list[type[e.Event]] = []
    from kinlog.replay.views import group_history

    reading_them = group_history.payload_columns

    def watched(event_type, rows, names):
        if names:
            decoded.append(event_type)
        return reading_them(event_type, rows, names)

    monkeypatch.setattr(group_history, "payload_columns", watched)
    view_table(scan, "attempts", ["reason", "outcome"])
    assert decoded == []
    view_table(scan, "attempts", ["worker"])
    assert set(decoded) == {e.SiblingDispatched}


def test_what_is_in_memory_follows_what_is_alive_and_not_the_length_of_the_run(monkeypatch):
    from kinlog.replay.views.group_history import GroupHistories

    kept: list[int] = []
    completing = GroupHistories._complete

    def watched(self, found):
        yield from completing(self, found)
        kept.append(sum(rows.num_rows for rows in self._kept.values()))

    monkeypatch.setattr(GroupHistories, "_complete", watched)

    def long_life(ledger: Ledger) -> None:
        told = Story(ledger)
        for _ in range(60):
            told.train(told.finalized(), told.finalized())

    store = MortalStore()
    live(store, long_life)
    table = view_table(scan_log(LOG, store=store), "attempts")
    assert table.num_rows == 240
    assert max(kept) < 90


def test_step_that_a_restart_undid_is_there_and_does_not_survive():
    def life(ledger: Ledger) -> None:
        told = Story(ledger)
        first, second = told.finalized(), told.finalized()
        checkpoint = told.checkpoint()
        told.train(first)
        told.restore(checkpoint)
        told.train(second)
        told.commit(e.GroupDropped(group_id=first, reason=Reason.STALE))

    store = MortalStore()
    live(store, life)
    scan = scan_log(LOG, store=store)
    steps = rows_of(scan, "steps")
    assert [(s["train_step"], s["surviving"]) for s in steps] == [(1, False), (1, True)]
    restored = next(r.seq for r in scan.events() if isinstance(r.event, e.RunRestored))
    assert steps[0]["undone_seq"] == restored
    undone = {(r["kind"], r["train_step"]) for r in rows_of(scan, "events") if not r["surviving"]}
    assert undone == {("group_claimed", 1), ("step_applied", 1), ("weights_published", 1)}
    groups = {g["group_id"]: g for g in rows_of(scan, "groups")}
    assert (groups[0]["phase"], groups[0]["applied_step"], groups[0]["times_undone"]) == ("dropped", None, 1)
    assert (groups[1]["phase"], groups[1]["applied_step"], groups[1]["place"]) == ("applied", 1, 0)


def test_live_log_with_a_torn_tail_is_read_up_to_its_last_whole_frame(tmp_path):
    run = small_run(tmp_path / "run")
    run.position()
    live_rows = rows_of(scan_log(run.directory.log), "events")
    assert len(live_rows) == run.p.last_seq
    newest = max(run.directory.log.glob("segment-*"))
    content = newest.read_bytes().rstrip(b"\0")
    run.kill()
    Path(newest).write_bytes(content[:-3])
    torn = rows_of(scan_log(run.directory.log), "events")
    assert torn == live_rows[: len(torn)]
    assert 0 < len(torn) < len(live_rows)
