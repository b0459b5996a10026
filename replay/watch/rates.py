"""How fast a run goes: tokens over the last minute, and the pace of its steps. By the times of its events."""

from collections import deque

__all__ = ["StepPace", "TokenRate"]

_WINDOW_US = 60_000_000
_STEPS = 16


class TokenRate:
    """Tokens of sealed siblings over the last minute."""

    def __init__(self) -> None:
        self._sealed: deque[tuple[int, int]] = deque()
        self._tokens = 0

    def add(self, time_us: int, tokens: int) -> None:
        """Count what was sealed. Times may go back: clocks do."""
        self._sealed.append((time_us, tokens))
        self._tokens += tokens
        self._forget(time_us)

    def per_second(self, now_us: int, *, since_us: int = 0) -> float:
        """Return tokens a second over the minute before ``now_us``; over less when there was nothing before ``since_us``,
        where the life of the run began."""
        self._forget(now_us)
        seconds = min(_WINDOW_US, now_us - since_us) / 1e6
        return self._tokens / seconds if seconds > 0 else 0.0

    def _forget(self, now_us: int) -> None:
        while self._sealed and self._sealed[0][0] <= now_us - _WINDOW_US:
            self._tokens -= self._sealed.popleft()[1]


class StepPace:
    """Seconds a step, over the last few that were applied in one go."""

    def __init__(self) -> None:
        self._applied: deque[tuple[int, int]] = deque(maxlen=_STEPS)

    def add(self, train_step: int, time_us: int) -> None:
        """Count an applied step. One that does not follow the last one begins anew: a restart went back."""
        if self._applied and train_step != self._applied[-1][0] + 1:
            self._applied.clear()
        self._applied.append((train_step, time_us))

    @property
    def last_us(self) -> int | None:
        """When the last step was applied."""
        return self._applied[-1][1] if self._applied else None

    @property
    def seconds_per_step(self) -> float | None:
        """``None`` before two steps were applied."""
        if len(self._applied) < 2:
            return None
        (first, began_us), (last, ended_us) = self._applied[0], self._applied[-1]
        return max(0.0, (ended_us - began_us) / 1e6 / (last - first))

    def seconds_to(self, max_steps: int, *, now_us: int) -> float | None:
        """Return how long it takes until ``max_steps`` are applied, at this pace; ``None`` when that is not known."""
        pace = self.seconds_per_step
        if pace is None:
            return None
        last, ended_us = self._applied[-1]
        passed = min(pace, max(0.0, (now_us - ended_us) / 1e6))
        return max(0.0, (max_steps - last) * pace - passed) if max_steps > last else 0.0
