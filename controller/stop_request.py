"""Whether the run was told to stop: looked at by whatever would begin something new.

What comes of it is in ``preemption``.
"""

__all__ = ["StopRequest"]


class StopRequest:
    """Once asked, no prompt is drawn, no attempt dispatched and no step claimed any more. It is not taken back."""

    def __init__(self) -> None:
        self.asked_at_s: float | None = None
        """The event loop's clock."""
        self.training_rests = False
        """Nothing is claimed, and the train pump claims and saves nothing any more."""

    @property
    def asked(self) -> bool:
        return self.asked_at_s is not None
