"""What the views must say, told event by event in plain Python: one dictionary for each row, and no columns."""

from decimal import Decimal
from enum import Enum
from typing import Any

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupPhase
from kinlog.replay.audit.account import Account
from kinlog.schemas import events as e

Row = dict[str, Any]

SEALED = (
    "validity",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "resumed_tokens",
    "raw_reward",
    "shaped_reward",
    "max_weight_version",
)


class ViewOracle:
    """Reads a log with nothing dropped."""

    def __init__(self, scan: LogScan) -> None:
        self.p = scan.beginning()
        self.account = Account(scan.beginning())
        self.attempts: dict[tuple[int, int, int], Row] = {}
        self.left: dict[int, Row] = {}
        self.applied: dict[int, list[int]] = {}
        """Step -> seqs of when it was applied."""
        self.undone: dict[int, int] = {}
        """Seq of an applied step -> seq of the restart that undid it."""
        for record in scan.events():
            self._add(record)
            self.account.add(record)
            fold(self.p, record)

    def _add(self, record: e.RecordedEvent) -> None:
        event, seq = record.event, record.seq
        match event:
            case e.SiblingDispatched():
                self.attempts[event.group_id, event.generation, event.attempt] = {
                    "group_id": event.group_id,
                    "generation": event.generation,
                    "attempt": event.attempt,
                    "outcome": "running",
                    "reason": None,
                    "detail": None,
                    "worker": event.worker,
                    "seed": Decimal(event.seed),
                    "resumes_attempt": event.resumes_attempt,
                    "epoch": record.epoch,
                    "dispatched_weight_version": event.weight_version,
                    "dispatched_seq": seq,
                    "sealed_seq": None,
                    "model_calls": None,
                    "min_weight_version": None,
                    **dict.fromkeys(SEALED),
                    "ended_seq": None,
                    "late_seq": None,
                    "late_tokens": None,
                }
            case e.SiblingSealed():
                row = self.attempts[event.group_id, event.generation, event.attempt]
                row |= {"outcome": "sealed", "sealed_seq": seq, "ended_seq": seq}
                row |= {name: _shown(getattr(event, name)) for name in SEALED}
                row["min_weight_version"] = event.weight_version
                row["model_calls"] = None if event.receipt is None else len(event.receipt.calls)
            case e.AttemptSuperseded():
                row = self.attempts[event.group_id, event.generation, event.attempt]
                row |= {"outcome": "superseded", "ended_seq": seq}
                row |= {"reason": event.reason.value, "detail": event.detail}
            case e.LateResultRejected():
                late = self.attempts.get((event.group_id, event.generation, event.attempt))
                if late is not None and late["late_seq"] is None:
                    late |= {"late_seq": seq, "late_tokens": event.completion_tokens}
            case e.GroupDropped() | e.GroupParked():
                self.left[event.group_id] = {"reason": event.reason.value, "seq": seq, "detail": event.detail}
                for row in self.attempts.values():
                    if row["group_id"] == event.group_id and row["outcome"] == "running":
                        row |= {"outcome": "abandoned", "ended_seq": seq}
                        row |= {"reason": event.reason.value, "detail": event.detail}
            case e.StepApplied():
                self.applied.setdefault(event.train_step, []).append(seq)
            case e.RunRestored():
                for step, seqs in self.applied.items():
                    if step > event.train_step:
                        self.undone |= {at: seq for at in seqs if at not in self.undone}

    def phase_of(self, group_id: int) -> str:
        """What became of a group: forgotten ones were applied, or dropped."""
        group = self.p.groups.get(group_id)
        if group is not None:
            return group.phase.value
        return "applied" if self.account.applied_groups()[group_id] else "dropped"

    def siblings_of(self, group_id: int) -> dict[int, Row]:
        """Of a group that the projection has: generation -> what the view must say."""
        group = self.p.groups[group_id]
        return {
            sibling.generation: {
                "attempt": sibling.attempt,
                "state": self._state(group.phase, group_id, sibling.generation, sibling.attempt),
                "sealed_seq": sibling.sealed_seq or None,
                "redone_reason": None if sibling.last_reason is None else sibling.last_reason.value,
                **{name: _shown(getattr(sibling.sealed, name, None)) for name in SEALED},
            }
            for sibling in group.siblings.values()
        }

    def _state(self, phase: GroupPhase, group_id: int, generation: int, attempt: int) -> str:
        sibling = self.p.groups[group_id].siblings[generation]
        if sibling.sealed is not None or sibling.running:
            return "sealed" if sibling.sealed is not None else "running"
        gone = phase is GroupPhase.PARKED and attempt
        return (
            "abandoned" if gone and self._outcome(group_id, generation, attempt) == "abandoned" else "waiting"
        )

    def _outcome(self, group_id: int, generation: int, attempt: int) -> str:
        return str(self.attempts[group_id, generation, attempt]["outcome"])


def _shown(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
