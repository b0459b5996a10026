"""Environments: who judges an answer, and what an agent does about the verdict."""

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kinlog.schemas.settings import RolloutSettings
from kinlog.workers.tasks import Item

__all__ = [
    "Environment",
    "EnvironmentFailure",
    "Episode",
    "ResumableEpisode",
    "Retry",
    "Scorer",
    "SingleTurn",
    "StateNotUsableError",
    "Verdict",
]

#: How the ``retry`` agent says that an answer was wrong.
_WRONG = "?"

_INTEGER = re.compile(r"-?[0-9]+")


class EnvironmentFailure(Exception):
    """The environment could not judge, through no fault of the tokens. The rollout is kept, and not trained on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an environment says about the answer of one model call."""

    reward: float
    """The rollout's reward if it ends here, before shaping."""
    well_formed: bool
    """Whether the answer looks like one: here, an integer."""
    feedback: str | None = None
    """What the policy reads before its next call; ``None`` ends the rollout."""


class Scorer(Protocol):
    """The verifier: :class:`kinlog.workers.tasks.TaskMixture`, or what a test puts in its place."""

    def score(self, item: Item, answer: str) -> float:
        """Return a score in [0, 1], where 1 is right."""
        ...


class StateNotUsableError(Exception):
    """A saved state is not one that the environment can go on from: the rollout is begun anew."""


class Episode(Protocol):
    """The environment of one rollout, from its beginning to its end."""

    async def judge(self, answer: str, *, call: int) -> Verdict:
        """Return the verdict on ``answer``, the decoded completion of model call ``call`` (from 0).

        Raises
        ------
        EnvironmentFailure
            It cannot tell.
        """
        ...


@runtime_checkable
class ResumableEpisode(Episode, Protocol):
    """An episode that another process can go on with after a turn. Optional: one that cannot is run again."""

    @property
    def state_version(self) -> int:
        """Version of what :meth:`save_state` returns, from 0 to ``2**31 - 1``."""
        ...

    def save_state(self) -> bytes:
        """Return where the episode stands, after each verdict. At most ``rollout.max_state_bytes``, of any encoding but
        one that runs code when it is read."""
        ...

    def restore_state(self, state: bytes, version: int) -> None:
        """Put an episode that was just begun where another one stood.

        Raises
        ------
        StateNotUsableError
            It is of a version that is not known any more, or damaged.
        """
        ...


@runtime_checkable
class Environment(Protocol):
    """Begins episodes. Siblings share it, so what differs between rollouts belongs to the episode."""

    def begin(self, item: Item) -> Episode:
        """Return a new episode on a row of the dataset."""
        ...


class _Stateless:
    """An episode that keeps nothing between its turns: it can go on anywhere."""

    state_version = 1

    def save_state(self) -> bytes:
        return b""

    def restore_state(self, state: bytes, version: int) -> None:
        if (state, version) != (b"", self.state_version):
            raise StateNotUsableError(
                f"expected the empty state of version {self.state_version}, found {len(state)} bytes of version {version}"
            )


class SingleTurn:
    """One model call; its score is the reward."""

    def __init__(self, scorer: Scorer, settings: RolloutSettings) -> None:
        self._scorer = scorer

    def begin(self, item: Item) -> Episode:
        """Return an episode of one turn."""
        return _SingleTurnEpisode(self._scorer, item)


@dataclass(frozen=True, slots=True)
class _SingleTurnEpisode(_Stateless):
    _scorer: Scorer
    _item: Item

    async def judge(self, answer: str, *, call: int) -> Verdict:
        score = self._scorer.score(self._item, answer)
        return Verdict(reward=score, well_formed=_is_integer(answer), feedback=None)


class Retry:
    """A wrong answer is told so and gets another call, up to ``max_turns``. The last answer is the one that counts.

    Its reward is ``score * retry_discount ** call``: a right answer is worth more the sooner it comes, and a partly
    right one cannot be banked by stopping early.
    """

    def __init__(self, scorer: Scorer, settings: RolloutSettings) -> None:
        self._scorer = scorer
        self._settings = settings

    def begin(self, item: Item) -> Episode:
        """Return an episode of up to ``max_turns`` turns."""
        return _RetryEpisode(self._scorer, item, self._settings)


@dataclass(frozen=True, slots=True)
class _RetryEpisode(_Stateless):
    _scorer: Scorer
    _item: Item
    _settings: RolloutSettings

    async def judge(self, answer: str, *, call: int) -> Verdict:
        score = self._scorer.score(self._item, answer)
        ended = score >= 1.0 or call + 1 >= self._settings.max_turns
        return Verdict(
            reward=score * self._settings.retry_discount**call,
            well_formed=_is_integer(answer),
            feedback=None if ended else _WRONG,
        )


def _is_integer(answer: str) -> bool:
    return _INTEGER.fullmatch(answer) is not None
