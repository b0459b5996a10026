"""Larger steps than before: groups that were drawn for smaller ones may leave no permits for those that are missing."""

from collections.abc import Callable

from kinlog.lineage.state import GroupState, Projection
from kinlog.schemas.errors import ConfigError

__all__ = ["refuse_unfillable_step"]


def refuse_unfillable_step(
    p: Projection, *, groups_per_step: int, max_live_groups: int, is_stale: Callable[[GroupState], bool]
) -> None:
    """Refuse a larger step that could only be filled by more groups than there are permits.

    Groups that are drawn for a step are trained in that step, whatever the next one lacks: to take those of later steps
    would make what is trained on together depend on where a run was killed.

    Parameters
    ----------
    p:
        The restored projection.
    groups_per_step, max_live_groups:
        As configured now.
    is_stale:
        The sampler's judgement: what it calls stale is dropped, and gives its permit back.

    Raises
    ------
    ConfigError
        The next step was begun as a smaller one, and later steps hold the permits that it needs now.
    """
    step = p.train_step + 1
    live = [group for group in p.live_groups() if not is_stale(group)]
    due = sum(group.train_step in (step, None) for group in live)
    missing = groups_per_step - due
    later = [group for group in live if group.train_step is not None and group.train_step > step]
    begun_as_smaller = p.places.get(step, 0) < groups_per_step
    if later and begun_as_smaller and missing > 0 and len(live) + missing > max_live_groups:
        raise ConfigError(
            f"trainer.groups_per_step is {groups_per_step}, and step {step} was begun with {due} groups, when steps were "
            f"smaller: with the {len(later)} that were drawn for later steps, rollout.max_live_groups ({max_live_groups}) "
            f"leaves no permits for the {missing} that are missing. Nothing was changed. Set trainer.groups_per_step "
            f"back, or rollout.max_live_groups to {len(live) + missing} or more."
        )
