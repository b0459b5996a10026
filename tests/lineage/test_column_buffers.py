"""Frames built from plain buffers are what Arrow itself would have built."""

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kinlog.lineage.encoder import FrameEncoder
from kinlog.lineage.segment import SegmentInfo
from kinlog.schemas.codec import EncodedEvent
from kinlog.schemas.columns import KIND_NAMES, REASON_NAMES, log_schema

INFO = SegmentInfo(
    log_id="l", run_id="r", epoch=2**32 - 1, index=0, first_seq=1, previous=0, writer_version="t"
)
INT64 = st.none() | st.integers(-(2**63), 2**63 - 1)
INT32 = st.none() | st.integers(-(2**31), 2**31 - 1)
ROWS = st.builds(
    EncodedEvent,
    kind=st.sampled_from(KIND_NAMES),
    version=st.integers(0, 255),
    group_id=INT64,
    generation=INT32,
    attempt=INT32,
    train_step=INT64,
    weight_version=INT64,
    reason=st.none() | st.sampled_from(REASON_NAMES),
    payload=st.binary(max_size=40),
)
LOW = EncodedEvent(KIND_NAMES[0], 0, -(2**63), -(2**31), -(2**31), -(2**63), -(2**63), REASON_NAMES[0], b"")
HIGH = EncodedEvent(
    KIND_NAMES[-1], 255, 2**63 - 1, 2**31 - 1, 2**31 - 1, 2**63 - 1, 2**63 - 1, REASON_NAMES[-1], b"x" * 4096
)
NULLS = EncodedEvent(KIND_NAMES[0], 1, None, None, None, None, None, None, b"\x90")


def built_by_kinlog(rows: list[EncodedEvent], times_us: list[int], first_seq: int) -> pa.RecordBatch:
    encoder = FrameEncoder(INFO)
    stream = bytes(encoder.opening(0)) + bytes(encoder.frame(rows, times_us, first_seq, 0)[0])
    empty, batch = pa.ipc.open_stream(stream)
    assert empty.num_rows == 0
    return batch


def built_by_arrow(rows: list[EncodedEvent], times_us: list[int], first_seq: int) -> pa.RecordBatch:
    columns = {
        "seq": list(range(first_seq, first_seq + len(rows))),
        "epoch": [INFO.epoch] * len(rows),
        "time": times_us,
    }
    columns |= {name: [getattr(row, name) for row in rows] for name in EncodedEvent._fields}
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in log_schema()], schema=log_schema()
    )


def values_of(batch: pa.RecordBatch) -> dict[str, list[object]]:
    # Arrow's times reach further than Python's.
    time = batch.schema.get_field_index("time")
    return batch.set_column(time, "time", batch.column(time).cast(pa.int64())).to_pydict()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(ROWS, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=20),
    st.integers(1, 2**64 - 32),
)
@example([(LOW, 0), (NULLS, 1), (HIGH, 2)], 1)
@example([(NULLS, 0)] * 8, 1)
@example([(NULLS, 0)] * 8 + [(HIGH, 0)], 1)
@example([(HIGH, 0)] * 300, 1)
def test_frame_holds_the_batch_that_arrow_builds_of_the_same_values(rows_and_times, first_seq):
    rows = [row for row, _ in rows_and_times]
    times_us = [time_us for _, time_us in rows_and_times]
    ours = built_by_kinlog(rows, times_us, first_seq)
    ours.validate(full=True)
    theirs = built_by_arrow(rows, times_us, first_seq)
    assert [column.null_count for column in ours.columns] == [column.null_count for column in theirs.columns]
    assert values_of(ours) == values_of(theirs)


def test_frame_costs_no_byte_more_than_arrow_would_write():
    rows = [LOW, NULLS, HIGH] * 7
    encoder = FrameEncoder(INFO)
    opening = bytes(encoder.opening(0))
    frame, _ = encoder.frame(rows, [0] * len(rows), 1, 0)
    reader = pa.ipc.open_stream(opening + bytes(frame))
    batch, metadata = [reader.read_next_batch_with_custom_metadata() for _ in range(2)][1]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
        before = sink.tell()
        writer.write_batch(batch, custom_metadata=metadata)
        assert sink.tell() - before == len(frame)
