"""The views: what a run's log looks like as tables, for SQL, for Parquet, and for any other Arrow tool.

This is the one place that says which views there are, which columns each has, of what type, and what they mean. What
``kinlog sql --views`` prints, what is documented, and the schemas of the data itself are all made from it.

No view promises an order of its rows. ``seq`` is the only order that there is: clocks may go backwards.
"""

from typing import NamedTuple

import pyarrow as pa

__all__ = ["VIEWS", "Column", "View", "describe_views"]


class Column(NamedTuple):
    """One column of a view."""

    name: str
    type: pa.DataType
    meaning: str


class View(NamedTuple):
    """One view: a table with one row for each of what it is named after."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def schema(self, names: tuple[str, ...] | None = None) -> pa.Schema:
        """Return the Arrow schema of these columns, or of all, each with its meaning in the field's metadata."""
        wanted = self.names if names is None else names
        by_name = {column.name: column for column in self.columns}
        return pa.schema(
            pa.field(name, by_name[name].type, metadata={"meaning": by_name[name].meaning}) for name in wanted
        )


_INT32, _INT64, _FLOAT, _TEXT, _BOOL = pa.int32(), pa.int64(), pa.float64(), pa.utf8(), pa.bool_()
_TIME = pa.timestamp("us", tz="UTC")
#: A seed may be any integer of 64 bits, with or without a sign.
_SEED = pa.decimal128(20, 0)

_SIBLING = (
    Column("group_id", _INT64, "the group; stable for ever"),
    Column("generation", _INT32, "the sibling's slot in its group, from 0"),
)

#: What a seal says, in every view that has one.
_SEALED = (
    Column("sealed_seq", _INT64, "when the result was accepted: the event"),
    Column("sealed_at", _TIME, "when the result was accepted"),
    Column("validity", _TEXT, "valid, placeholder, failed or poisoned: only a valid one is an example"),
    Column("finish_reason", _TEXT, "how the last model call ended: stop, length or aborted"),
    Column("prompt_tokens", _INT64, "tokens of the first prompt"),
    Column("completion_tokens", _INT64, "tokens that the policy generated, over all model calls"),
    Column("resumed_tokens", _INT64, "how many of them an earlier attempt had generated"),
    Column("model_calls", _INT64, "model calls of the rollout; null for a placeholder"),
    Column("raw_reward", _FLOAT, "the reward as the environment gave it"),
    Column("shaped_reward", _FLOAT, "the reward that is trained on"),
    Column("min_weight_version", _INT64, "the oldest weights behind a token of it"),
    Column("max_weight_version", _INT64, "the newest weights behind a token of it"),
)

_VIEWS = (
    View(
        "events",
        "every event of the log",
        (
            Column("seq", _INT64, "order of the event in its log, from 1, without gaps"),
            Column("epoch", _INT64, "the life of the controller that appended it"),
            Column("recorded_at", _TIME, "wall clock of the writer"),
            Column("kind", _TEXT, "what happened, such as sibling_sealed"),
            Column("version", _INT32, "version of that kind"),
            Column("group_id", _INT64, "the group; null for events of none"),
            Column("generation", _INT32, "the sibling's slot; null for events of none"),
            Column("attempt", _INT32, "the attempt; null for events of none"),
            Column("train_step", _INT64, "the optimizer step; for group_reserved the one it is drawn for"),
            Column("weight_version", _INT64, "the weights; for a seal the oldest behind a token of it"),
            Column("reason", _TEXT, "why; null for kinds that have no reason"),
            Column(
                "surviving",
                _BOOL,
                "false: a claim, a step, its weights or a checkpoint that a later restart went back behind",
            ),
            Column("payload", _TEXT, "all other fields of the event, as JSON; digests as hex"),
        ),
    ),
    View(
        "groups",
        "every group that was drawn",
        (
            Column("group_id", _INT64, "the group; stable for ever"),
            Column(
                "phase",
                _TEXT,
                "reserved, admitted, generating, ready, finalizing, finalized, claimed, applied, parked or dropped",
            ),
            Column("reason", _TEXT, "why it was dropped or parked; null otherwise"),
            Column("detail", _TEXT, "more of why, in words"),
            Column("task_name", _TEXT, "the prompt's task"),
            Column("agent_name", _TEXT, "the prompt's agent"),
            Column("sample_id", _TEXT, "the dataset's own name of the prompt"),
            Column("draw_index", _INT64, "the prompt's position in the run's draw order, from 0"),
            Column("dataset_epoch", _INT64, "whole passes over the dataset before this draw"),
            Column("num_generations", _INT32, "siblings that it has"),
            Column("granularity", _TEXT, "what a failure redoes: sibling or prompt_group"),
            Column("weight_version", _INT64, "weights when it was reserved"),
            Column(
                "target_step", _INT64, "the optimizer step that it was drawn for, where the sampler fixes one"
            ),
            Column("reserved_seq", _INT64, "when it was reserved: the event"),
            Column("reserved_at", _TIME, "when it was reserved"),
            Column("attempts", _INT64, "attempts that were dispatched for it"),
            Column("sealed_siblings", _INT64, "siblings whose result stands"),
            Column("completion_tokens", _INT64, "completion tokens of the results that stand"),
            Column(
                "valid_fraction",
                _FLOAT,
                "part of its canonical rows that are examples; null before they are published",
            ),
            Column("finalized_seq", _INT64, "when its canonical rows were published last: the event"),
            Column("finalized_at", _TIME, "when its canonical rows were published last"),
            Column(
                "applied_step", _INT64, "the optimizer step of the surviving history that was trained on it"
            ),
            Column("place", _INT64, "its place in that step, from 0"),
            Column("applied_seq", _INT64, "when that step was applied: the event"),
            Column("applied_at", _TIME, "when that step was applied"),
            Column("times_undone", _INT64, "applied steps of it that a restart undid"),
            Column("left_seq", _INT64, "when it was dropped, or else parked: the event"),
            Column("left_at", _TIME, "when it was dropped, or else parked"),
        ),
    ),
    View(
        "siblings",
        "every sibling of every group, as it is at the end of the log",
        (
            *_SIBLING,
            Column(
                "state",
                _TEXT,
                "waiting, running, sealed, or abandoned: running when its group was dropped or parked",
            ),
            Column("attempt", _INT32, "the newest attempt; 0 before the first"),
            Column("attempts", _INT64, "attempts that were dispatched for it"),
            Column("redone_reason", _TEXT, "why the last attempt that was superseded was given up"),
            *_SEALED,
        ),
    ),
    View(
        "attempts",
        "every attempt that was dispatched",
        (
            *_SIBLING,
            Column("attempt", _INT32, "number of the attempt, growing for each sibling"),
            Column(
                "outcome",
                _TEXT,
                "running, sealed, superseded (given up, perhaps after it was sealed), or abandoned: running when its "
                "group was dropped or parked",
            ),
            Column(
                "reason",
                _TEXT,
                "why it was superseded, or its group dropped or parked while it ran; null otherwise",
            ),
            Column("detail", _TEXT, "more of why, in words"),
            Column("worker", _TEXT, "the worker that it was sent to"),
            Column("seed", _SEED, "its sampling seed"),
            Column(
                "resumes_attempt", _INT32, "the attempt before, if it may go on from the tokens that it left"
            ),
            Column("epoch", _INT64, "the life of the controller that dispatched it"),
            Column("dispatched_weight_version", _INT64, "weights when it was dispatched"),
            Column("dispatched_seq", _INT64, "when it was dispatched: the event"),
            Column("dispatched_at", _TIME, "when it was dispatched"),
            *_SEALED,
            Column("ended_seq", _INT64, "when its outcome was decided: the event; null while it runs"),
            Column("ended_at", _TIME, "when its outcome was decided"),
            Column("late_seq", _INT64, "when a result of it came too late, and was rejected: the event"),
            Column("late_tokens", _INT64, "completion tokens of that result"),
        ),
    ),
    View(
        "steps",
        "every optimizer step that was applied, those that a restart undid included",
        (
            Column("train_step", _INT64, "number of the step; more than once when a restart undid it"),
            Column("surviving", _BOOL, "false: a restart undid it"),
            Column("undone_seq", _INT64, "the restart that undid it: its run_restored event"),
            Column("epoch", _INT64, "the life of the controller that applied it"),
            Column("applied_seq", _INT64, "when it was applied: the event"),
            Column("applied_at", _TIME, "when it was applied"),
            Column("num_groups", _INT64, "groups that it was trained on"),
            Column("expected_groups", _INT64, "groups that were configured, where it had to do with fewer"),
            Column("shrunk_reason", _TEXT, "why it had to do with fewer"),
        ),
    ),
    View(
        "step_groups",
        "every group of every applied step, in the order in which it was trained on",
        (
            Column("train_step", _INT64, "number of the step"),
            Column("place", _INT64, "the group's place in the step, from 0"),
            Column("group_id", _INT64, "the group"),
            Column("surviving", _BOOL, "false: a restart undid the step"),
            Column("applied_seq", _INT64, "when the step was applied: the event"),
        ),
    ),
    View(
        "checkpoints",
        "every checkpoint that was committed, or given up",
        (
            Column("name", _TEXT, "name of its directory, which may have been pruned since"),
            Column("outcome", _TEXT, "committed or failed"),
            Column("kind", _TEXT, "trainer or rollout; null for one that failed"),
            Column("train_step", _INT64, "the last optimizer step in it; null for one that failed"),
            Column(
                "surviving", _BOOL, "false: a later restart went back behind it; null for one that failed"
            ),
            Column("seq", _INT64, "when it was committed or given up: the event"),
            Column("recorded_at", _TIME, "when it was committed or given up"),
            Column("epoch", _INT64, "the life of the controller that took it"),
            Column("position_seq", _INT64, "the last event that is in it"),
            Column("frontier_step", _INT64, "the oldest step that could be gone back to from then on"),
            Column("reason", _TEXT, "why it failed"),
            Column("detail", _TEXT, "more of why, in words"),
        ),
    ),
    View(
        "lives",
        "every life of the controller",
        (
            Column("epoch", _INT64, "number of the life: its writer epoch"),
            Column("host", _TEXT, "where it ran"),
            Column("pid", _INT64, "its process"),
            Column("first_seq", _INT64, "its first event"),
            Column("last_seq", _INT64, "its last event"),
            Column("began_at", _TIME, "wall clock of its first event"),
            Column("ended_at", _TIME, "wall clock of its last event"),
            Column("ending", _TEXT, "closed, killed, or open: running, or killed and not resumed yet"),
            Column(
                "restored_checkpoint", _TEXT, "what it restored; null for the start of the run, or nothing"
            ),
            Column("restored_step", _INT64, "the step that it went back to; null when it restored nothing"),
            Column("quarantined_bytes", _INT64, "what its repairs of torn tails copied aside"),
        ),
    ),
)

#: All views, by name.
VIEWS: dict[str, View] = {view.name: view for view in _VIEWS}

_TYPE_NAMES = {
    _INT32: "int32",
    _INT64: "int64",
    _FLOAT: "float64",
    _TEXT: "text",
    _BOOL: "bool",
    _TIME: "time (µs, UTC)",
    _SEED: "integer",
}


def describe_views(views: tuple[View, ...] = _VIEWS) -> list[tuple[str, str, str, str]]:
    """Return a row for each column of each view: the view, the column, its type, and its meaning."""
    return [
        (view.name, column.name, _TYPE_NAMES[column.type], column.meaning)
        for view in views
        for column in view.columns
    ]
