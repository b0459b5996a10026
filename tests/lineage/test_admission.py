"""What no column can hold is refused by name, before it has a place in the log."""

import pytest
from kinlog_builders import FreeCut, append_now, numbered, open_ledger

from kinlog.lineage.admission import check_columns
from kinlog.schemas import events as e
from kinlog.schemas.codec import EncodedEvent, encode_event

ROW = EncodedEvent("sibling_dispatched", 255, 2**63 - 1, 2**31 - 1, -(2**31), None, -(2**63), None, b"")

TOO_LARGE = {
    "version": 256,
    "group_id": 2**63,
    "generation": 2**31,
    "attempt": -(2**31) - 1,
    "train_step": -(2**63) - 1,
    "weight_version": 2**70,
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_value_that_its_column_cannot_hold_is_refused_by_name(name):
    row = ROW._replace(**{name: TOO_LARGE[name]})
    with pytest.raises(ValueError, match=rf"event 2 of the append: {name} is {TOO_LARGE[name]}.*takes.*from"):
        check_columns([ROW, ROW, row])


@pytest.mark.parametrize(("name", "value"), [("group_id", "7"), ("train_step", 1.5), ("attempt", b"1")])
def test_value_that_is_no_integer_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is "):
        check_columns([ROW._replace(**{name: value})])


@pytest.mark.parametrize("changed", [{"kind": "weather_observed"}, {"reason": "weather"}])
def test_kind_or_reason_without_a_code_is_refused_by_name(changed):
    with pytest.raises(ValueError, match="weather"):
        check_columns([ROW._replace(**changed)])


def test_append_of_what_no_column_holds_is_refused_and_harms_nothing(opening):
    log = opening()
    too_large = encode_event(e.GroupClaimed(group_id=1, train_step=2**63))
    with pytest.raises(ValueError, match=r"group_claimed.*train_step.*Nothing was appended"):
        log.writer.append([encode_event(numbered(1)), too_large], 0)
    assert append_now(log, numbered(1)) == 1


def test_commit_of_what_no_column_holds_changes_neither_projection_nor_log(tmp_path):
    with open_ledger(tmp_path / "log") as ledger:
        too_large = e.WeightsPublished(weight_version=2**63, train_step=1)
        with pytest.raises(ValueError, match=r"weights_published.*weight_version"):
            ledger.commit(FreeCut(), numbered(1), too_large)
        assert (ledger.projection.last_seq, ledger.projection.weight_version) == (0, 0)
        assert ledger.commit(FreeCut(), numbered(2)).seq == 1
