"""Record batches of recorded events, without a log around them."""

from collections.abc import Sequence

import pyarrow as pa

from kinlog.schemas.codec import encode_event
from kinlog.schemas.columns import log_schema
from kinlog.schemas.events import RecordedEvent

SCHEMA = log_schema({"kinlog.ignorable_kinds": '["weather_observed"]'})


def batch_of(records: Sequence[RecordedEvent]) -> pa.RecordBatch:
    """The events as one record batch of a log."""
    rows = [(r.seq, r.epoch, r.time_us, *encode_event(r.event)) for r in records]
    columns = zip(*rows, strict=True) if rows else [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def newest_first(
    records: Sequence[RecordedEvent], *, after_seq: int = 0, rows: int = 16
) -> list[pa.RecordBatch]:
    """The events past ``after_seq`` as record batches of so many rows, the newest batch first."""
    batch = batch_of([record for record in records if record.seq > after_seq])
    return [batch.slice(start, rows) for start in range(0, batch.num_rows, rows)][::-1]
