"""Times for a picture: a log's clock may go back, and what is drawn may not."""

__all__ = ["SteadyClock"]


class SteadyClock:
    """A clock that never goes back, whatever the log's did: what follows a step back is shown as much later."""

    def __init__(self) -> None:
        self.first_us = self.last_us = 0
        self.went_back = 0
        self._offset_us = 0

    def __call__(self, time_us: int) -> int:
        shown = time_us + self._offset_us
        if not self.first_us:
            self.first_us = shown
        elif shown < self.last_us:
            self.went_back += 1
            self._offset_us += self.last_us - shown
            shown = self.last_us
        self.last_us = shown
        return shown
