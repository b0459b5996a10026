"""When a run cannot come to anything: found out before the whole dataset is set aside, and never called a success."""

from kinlog.controller.runtime import Runtime
from kinlog.schemas.errors import RolloutsFailError
from kinlog.schemas.reasons import Reason

__all__ = ["refuse_hopeless", "refuse_nothing_trained"]

#: Groups that must have been given up, without one success, before the run is called hopeless.
_HOPELESS_GROUPS = 16

_ADVICE = (
    "Run 'kinlog log show RUN --kind attempt_superseded' for what they failed of, and correct it. The run can then be "
    "resumed"
)


def refuse_hopeless(runtime: Runtime) -> None:
    """Stop before a mistake that fails every rollout has set the whole dataset aside, group by group.

    Raises
    ------
    RolloutsFailError
        Many groups were given up, and no rollout has ever succeeded.
    """
    p = runtime.projection
    given_up = p.parked_total + p.dropped.get(Reason.RETRY_BUDGET, 0)
    if p.sealed_total == 0 and given_up >= max(_HOPELESS_GROUPS, runtime.config.rollout.max_live_groups):
        raise RolloutsFailError(
            f"{given_up} groups were given up, and no rollout has succeeded yet. {_ADVICE}."
        )


def refuse_nothing_trained(runtime: Runtime) -> None:
    """Refuse to end in success when the dataset is used up, and no step was ever trained.

    Raises
    ------
    RolloutsFailError
        Every group was given up.
    """
    p = runtime.projection
    if p.train_step == 0 and p.parked_total + p.dropped_total > 0:
        raise RolloutsFailError(
            f"the dataset is used up and not one step was trained: {p.parked_total} groups are parked, and "
            f"{p.dropped_total} were dropped. {_ADVICE} with more of dataset.max_epochs."
        )
