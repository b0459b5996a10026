"""Capacity: what a restart does about live groups that the buffer has no permits for any more."""

import math
from collections.abc import Sequence
from typing import Literal

from kinlog.lineage.state import GroupState
from kinlog.schemas.errors import ConfigError

__all__ = ["groups_over_capacity"]


def groups_over_capacity(
    groups: Sequence[GroupState], *, max_live_groups: int | None, policy: Literal["keep", "evict", "refuse"]
) -> list[GroupState]:
    """Return the groups that are evicted since there are fewer permits than before.

    Those that were drawn for the furthest steps go first, then those that were drawn last: the next steps stay whole,
    the least finished work is lost, and the choice does not fall on prompts for how long their rollouts take. Groups
    that are trained on again had given their permits away, and are not counted.

    Parameters
    ----------
    groups:
        The live groups that the restart would otherwise keep.
    max_live_groups:
        The permits that there are now; ``None`` when that is not known.
    policy:
        ``rollout_recovery.over_capacity``.

    Raises
    ------
    ConfigError
        There are too many, and the policy is ``refuse``.
    """
    holding = [group for group in groups if not group.rolled_back]
    if max_live_groups is None or policy == "keep" or len(holding) <= max_live_groups:
        return []
    if policy == "refuse":
        raise ConfigError(
            f"rollout.max_live_groups is {max_live_groups}, and {len(holding)} groups are alive. Nothing was changed. "
            f"Set it to {len(holding)} or more, or rollout_recovery.over_capacity to keep (nothing is drawn until there "
            "is room) or to evict"
        )
    furthest_first = sorted(
        holding,
        key=lambda group: (math.inf if group.train_step is None else group.train_step, group.group_id),
        reverse=True,
    )
    return sorted(furthest_first[: len(holding) - max_live_groups], key=lambda group: group.group_id)
