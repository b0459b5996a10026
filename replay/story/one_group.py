"""One group's way through a log, by the one transition function, as if there had been no other group."""

import msgspec

from kinlog.lineage.fold import fold
from kinlog.lineage.state import GroupState, Projection
from kinlog.schemas import events as e

__all__ = ["OneGroup"]


class OneGroup:
    """Folds the events that say something of one group. All that other groups leave behind is passed over.

    Parameters
    ----------
    group_id:
        The group.
    beginning:
        What the log begins at. It is changed.
    """

    def __init__(self, group_id: int, beginning: Projection) -> None:
        self.group_id = group_id
        self._p = beginning
        beginning.groups = {number: group for number, group in beginning.groups.items() if number == group_id}
        beginning.steps = {
            step: (group_id,) for step, group_ids in beginning.steps.items() if group_id in group_ids
        }

    @property
    def state(self) -> GroupState | None:
        """The group as it stands; ``None`` before its reservation, and once it has left or is forgotten."""
        return self._p.groups.get(self.group_id)

    def fold(self, record: e.RecordedEvent) -> None:
        """Apply the next event that may be about the group.

        Raises
        ------
        TransitionError
            It does not fit the state.
        """
        p, event = self._p, record.event
        match event:
            case e.GroupReserved(group_id=group_id, draw_cursor=draw_cursor):
                p.next_group_id, p.draw_cursor = group_id, draw_cursor - 1
            case e.StepApplied(train_step=step):
                p.train_step = step - 1
                event = msgspec.structs.replace(event, group_ids=(self.group_id,))
            case e.GroupClaimed(train_step=step):
                p.train_step = step - 1
            case e.RunRestored(train_step=step) | e.CheckpointCommitted(frontier_step=step):
                p.train_step = max(p.train_step, step)
        p.last_seq = record.seq - 1
        fold(p, e.RecordedEvent(record.seq, record.epoch, record.time_us, event))
