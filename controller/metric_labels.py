"""The labels that several metrics have, each with every value that it can have."""

from kinlog.controller.metric_kinds import Label
from kinlog.lineage.state import GroupPhase
from kinlog.schemas.reasons import CheckpointKind, Reason

__all__ = ["CHECKPOINT", "CUT", "PHASE", "REASON", "RECOVERY_PHASE"]

REASON = Label("reason", tuple(reason.value for reason in Reason))
PHASE = Label("phase", tuple(phase.value for phase in GroupPhase if phase.value not in ("applied", "parked")))
CHECKPOINT = Label("kind", tuple(kind.value for kind in CheckpointKind))
CUT = Label(
    "kind",
    (
        "admit",
        "apply",
        "checkpoint",
        "checkpoint_committed",
        "checkpoint_failed",
        "claim",
        "close",
        "dispatch",
        "exhausted",
        "finalize",
        "finalize_failed",
        "finalized",
        "preempt",
        "reject",
        "reserve",
        "restore",
        "seal",
        "start",
    ),
)
RECOVERY_PHASE = Label(
    "phase",
    (
        "verify_log",
        "choose_checkpoint",
        "check_prompts",
        "data_plane_start",
        "data_plane_load",
        "inventory",
        "put_rows_back",
        "plan",
        "read_progress",
        "start_workers",
        "write_plan",
    ),
)
