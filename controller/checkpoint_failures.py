"""How many saves have failed one after the other: what turns a failed checkpoint into the end of the run."""

from collections import Counter

from kinlog.schemas.reasons import CheckpointKind

__all__ = ["FailuresInARow"]


class FailuresInARow:
    """Counts failures of both kinds together, and of each by itself: where saves of one kind always fail, those of the
    other that succeed in between must not hide it."""

    def __init__(self) -> None:
        self._together = 0
        self._by_kind: Counter[CheckpointKind] = Counter()

    def add(self, kind: CheckpointKind) -> None:
        """A save has failed."""
        self._together += 1
        self._by_kind[kind] += 1

    def end(self, kind: CheckpointKind) -> None:
        """A save has succeeded."""
        self._together = 0
        self._by_kind[kind] = 0

    def count(self, kind: CheckpointKind) -> tuple[int, str]:
        """Return how many have failed by now, the last of them of this kind, and what to call them."""
        if self._by_kind[kind] > self._together:
            return self._by_kind[kind], f"{kind} checkpoints"
        return self._together, "checkpoints"
