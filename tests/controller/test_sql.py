"""``kinlog sql`` answers from the views, reads only what a query names, reaches nothing else, and fails in one line."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from kinlog_run_fixtures import Chance, DiskRun

from kinlog.controller import sql_engine
from kinlog.controller.cli import cli
from kinlog.controller.sql_engine import columns_read, run_query
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.views.catalogue import VIEWS
from kinlog.replay.views.reading import view_table
from kinlog.schemas.errors import LogDamagedError, QueryError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lives, with checkpoints, failures and a restart in them; killed in the second."""
    run = DiskRun(tmp_path_factory.mktemp("sql") / "run")
    chance = Chance(run, 3, permits=8)
    chance.live(through_step=4, groups_per_step=2, checkpoint_every=3)
    run.kill()
    run.restart()
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    run.kill()
    return run.directory.path


@pytest.fixture(scope="module")
def scan(run: Path) -> LogScan:
    return scan_log(run / "log")


def asked(scan: LogScan, query: str, **choices: bool) -> list[tuple[object, ...]]:
    return list(run_query(scan, query, **choices).rows)


def kinlog_sql(run: Path, query: str, *options: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["sql", str(run), query, *options], input=stdin)


# ---- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_is_there_with_every_row_and_column(scan: LogScan, name: str):
    answer = run_query(scan, f"select * from {name}")
    table = view_table(scan, name)
    assert answer.columns == tuple(table.column_names)
    assert list(answer.rows) == [tuple(row.values()) for row in table.to_pylist()]
    assert table.num_rows


def test_attempts_are_counted_by_reason(scan: LogScan):
    counted = dict(asked(scan, "select reason, count(*) from attempts group by all"))
    reasons = view_table(scan, "attempts").column("reason").to_pylist()
    assert counted == {reason: reasons.count(reason) for reason in reasons}
    assert len(counted) > 2


def test_view_that_is_named_twice_is_read_twice(scan: LogScan):
    query = "select count(*) from attempts a join attempts b using (group_id, generation) where a.attempt < b.attempt"
    ((redone,),) = asked(scan, query)
    assert redone == asked(scan, "select sum(attempts * (attempts - 1) // 2) from siblings")[0][0] > 0


def test_payload_is_json_that_a_query_can_look_into(scan: LogScan):
    workers = asked(
        scan, "select distinct payload->>'$.worker' from events where kind = 'sibling_dispatched'"
    )
    assert sorted(workers) == [(f"worker-{g}",) for g in range(4)]


def test_payloads_of_other_events_than_those_asked_for_are_not_decoded(
    scan: LogScan, monkeypatch: pytest.MonkeyPatch
):
    kinds: list[str] = []
    making = sql_engine.payload_texts

    def watched(kind: pa.Array, *inputs: pa.Array) -> pa.Array:
        kinds.extend(kind.to_pylist())
        return making(kind, *inputs)

    monkeypatch.setattr(sql_engine, "payload_texts", watched)
    asked(scan, "select payload from events where kind = 'writer_opened'")
    assert kinds == ["writer_opened", "writer_opened"]


def test_times_are_utc_and_can_be_reckoned_with(scan: LogScan):
    query = "select min(ended_at - dispatched_at) >= interval 0 second, max(ended_at)::varchar from attempts"
    ((never_back, last),) = asked(scan, query)
    assert never_back
    assert str(last).endswith("+00")


# ---- only what a query names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select reason, count(*) from attempts group by all", {"attempts": ("reason",)}),
        ("select count(*) from events", {"events": ()}),
        ("select worker from attempts where detail like '%x%'", {"attempts": ("detail", "worker")}),
        ("select epoch from lives order by pid", {"lives": ("epoch", "pid")}),
        (
            "with a as (from attempts) select state from siblings join a using (group_id)",
            {"siblings": ("group_id", "state"), "attempts": ("group_id",)},
        ),
        (
            "select (select max(seq) from events), phase from groups",
            {"events": ("seq",), "groups": ("phase",)},
        ),
        ("select 1", {}),
    ],
)
def test_views_and_columns_that_a_query_reads_are_known_beforehand(query: str, expected: object):
    assert columns_read(query) == expected


def test_query_of_one_view_reads_no_other(scan: LogScan, monkeypatch: pytest.MonkeyPatch):
    read: list[tuple[str, tuple[str, ...]]] = []
    reading: Callable[..., object] = sql_engine.read_view

    def watched(scan: LogScan, name: str, columns: tuple[str, ...]) -> object:
        read.append((name, columns))
        return reading(scan, name, columns)

    monkeypatch.setattr(sql_engine, "read_view", watched)
    asked(scan, "select worker, count(*) from attempts where outcome = 'sealed' group by all")
    assert read == [("attempts", ("outcome", "worker"))]


def test_query_whose_columns_come_from_the_data_is_answered_all_the_same(scan: LogScan):
    # Its plan for empty tables does not name the column: it is found to be missing, and everything is read.
    assert "reason" not in columns_read("pivot attempts on reason using count(*)")["attempts"]
    answer = run_query(scan, "pivot attempts on reason using count(*) group by outcome")
    assert set(answer.columns) > {"outcome", "rows_missing"}
    assert sum(sum(n for n in row if isinstance(n, int)) for row in answer.rows) > 0


@pytest.mark.parametrize("query", ["describe attempts", "summarize lives", "show tables", "from lives"])
def test_what_is_no_plain_select_works_too(scan: LogScan, query: str):
    assert asked(scan, query)


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("selct 1", "syntax error"),
        ("select colour from groups", '"colour" not found'),
        ("select * from nothing", "nothing does not exist"),
        ("select 1; select 2", "expected one query, found 2"),
        ("", "expected one query, found 0"),
        ("select 'a'::int", "Could not convert"),
        ("select phase::int from groups", "Could not convert"),
        ("select error('told so') from groups", "told so"),
    ],
)
def test_query_that_cannot_be_answered_is_one_line_and_exit_code_26(run: Path, query: str, named: str):
    result = kinlog_sql(run, query)
    assert result.exit_code == QueryError.exit_code == 26
    assert result.stdout == ""
    assert result.stderr.startswith("kinlog: error [query]: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('{0}')",
        "select * from '{0}'",
        "copy (from lives) to '{1}'",
        "attach '{1}'",
        "install httpfs",
        "set threads = 1",
        "set enable_external_access = true",
        "select * from scan",
        "select * from sql_engine",
        "copy lives from '{0}'",
        "export database '{1}'",
    ],
)
def test_query_can_reach_nothing_but_the_views(run: Path, tmp_path: Path, query: str):
    there, new = tmp_path / "there.csv", tmp_path / "new"
    there.write_text("a,b\n1,2\n")
    result = kinlog_sql(run, query.format(there, new))
    assert result.exit_code == QueryError.exit_code
    assert [path.name for path in tmp_path.iterdir()] == ["there.csv"]


def test_files_are_read_and_written_where_that_is_allowed(run: Path, tmp_path: Path):
    groups, copied = tmp_path / "groups.csv", tmp_path / "copied.csv"
    groups.write_text("group_id,mine\n0,yes\n1,no\n")
    query = f"copy (select mine, phase from '{groups}' join groups using (group_id)) to '{copied}'"
    assert kinlog_sql(run, query).exit_code == QueryError.exit_code
    assert kinlog_sql(run, query, "--allow-files").exit_code == 0
    assert copied.read_text().startswith("mine,phase\n")


def test_query_changes_nothing_of_the_run(run: Path):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    kinlog_sql(run, "select count(*) from events join attempts using (group_id)")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_log_that_is_damaged_is_said_to_be(run: Path):
    class Changing(LocalStore):
        """A log whose bytes change after it was verified."""

        changed = False

        def read(self, path: Path) -> memoryview:
            data = bytearray(super().read(path))
            if self.changed:
                data[len(bytes(data).rstrip(b"\0")) // 2] ^= 1
            return memoryview(bytes(data))

    store = Changing()
    scan = scan_log(run / "log", store=store)
    store.changed = True
    with pytest.raises(LogDamagedError, match="segment changed while it was read"):
        asked(scan, "select reason from attempts")


def test_extra_that_is_missing_is_named(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "kinlog.controller.sql_engine")
    monkeypatch.delattr("kinlog.controller.sql_engine")
    result = kinlog_sql(run, "select 1")
    assert result.exit_code == 20
    assert 'pip install "kinlog[sql]"' in result.stderr
    assert result.stderr.count("\n") == 1


# ---- how it is printed -------------------------------------------------------------------------------------------

ODD = (
    "select 1::hugeint a, 0.5::decimal(3,1) b, 'x,\"y\"' c, null d, [1, null] e, {'k': true} f, 'nan'::double g, "
    "timestamptz '2026-01-31 23:59:59.5+00' h, interval 90 second i"
)


def test_json_is_an_array_of_objects(run: Path):
    result = kinlog_sql(run, ODD, "--json")
    assert json.loads(result.stdout) == [
        {
            "a": 1,
            "b": 0.5,
            "c": 'x,"y"',
            "d": None,
            "e": [1, None],
            "f": {"k": True},
            "g": None,
            "h": "2026-01-31T23:59:59.500000Z",
            "i": 90.0,
        }
    ]
    assert json.loads(kinlog_sql(run, "select epoch from lives where false", "--json").stdout) == []
    assert len(json.loads(kinlog_sql(run, "from events", "--json").stdout)) > 300


def test_csv_has_a_header_and_every_row(run: Path):
    header, row = csv.reader(io.StringIO(kinlog_sql(run, ODD, "--csv").stdout))
    assert header == list("abcdefghi")
    assert row == [
        "1",
        "0.5",
        'x,"y"',
        "",
        "[1,null]",
        '{"k":true}',
        "nan",
        "2026-01-31T23:59:59.500000Z",
        "90.0",
    ]
    rows = list(csv.reader(io.StringIO(kinlog_sql(run, "select * from range(5000)", "--csv").stdout)))
    assert len(rows) == 5001


def test_text_is_a_table_with_an_end(run: Path):
    result = kinlog_sql(
        run, "select kind, count(*) n from events where kind like 'run_%' group by all order by all"
    )
    assert result.stdout.splitlines()[0].split() == ["kind", "n"]
    assert result.stdout.splitlines()[1].split() == ["run_opened", "1"]
    long = kinlog_sql(run, "select * from range(1001)")
    assert len(long.stdout.splitlines()) == 1001
    assert "more than these 1,000 rows" in long.stderr
    assert kinlog_sql(run, "select * from range(1000)").stderr == ""


def test_query_is_read_from_the_standard_input(run: Path):
    result = kinlog_sql(run, "-", "--csv", stdin="select max(epoch) as epoch\nfrom lives -- the newest\n")
    assert (result.exit_code, result.stdout) == (0, "epoch\n2\n")


def test_two_ways_of_printing_are_refused(run: Path):
    assert kinlog_sql(run, "select 1", "--csv", "--json").exit_code == 2


def test_views_are_listed_without_a_run():
    result = CliRunner().invoke(cli, ["sql", "--views"])
    assert result.exit_code == 0
    for view in VIEWS.values():
        assert f"{view.name}: {view.meaning}" in result.stdout
        for column in view.columns:
            assert column.meaning in result.stdout


def test_examples_of_the_help_work(run: Path, monkeypatch: pytest.MonkeyPatch):
    help_text = CliRunner().invoke(cli, ["sql", "--help"]).stdout
    queries = [line.split('"')[1] for line in help_text.splitlines() if 'kinlog sql runs/first "' in line]
    assert len(queries) == 4
    for query in queries:
        assert kinlog_sql(run, query).exit_code == 0, query
    for name in VIEWS:
        assert f"  {name} " in help_text
