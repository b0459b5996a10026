"""An environment that remembers: what it says after a turn depends on all turns before it."""

import msgspec

from kinlog.schemas.settings import RolloutSettings
from kinlog.workers.environments import Episode, Scorer, StateNotUsableError, Verdict
from kinlog.workers.tasks import Item

#: What episodes of this process were asked to judge, over all of them.
judged: list[str] = []


class Tally:
    """Counts characters of all answers so far, and says the count. Three turns."""

    def __init__(self, scorer: Scorer | None = None, settings: RolloutSettings | None = None) -> None:
        pass

    def begin(self, item: Item) -> Episode:
        return TallyEpisode()


class TallyEpisode:
    state_version = 2

    def __init__(self) -> None:
        self.characters = 0

    async def judge(self, answer: str, *, call: int) -> Verdict:
        judged.append(answer)
        self.characters += len(answer) + 1
        return Verdict(
            reward=float(self.characters),
            well_formed=True,
            feedback=None if call == 2 else f"{self.characters}?",
        )

    def save_state(self) -> bytes:
        return msgspec.json.encode({"characters": self.characters})

    def restore_state(self, state: bytes, version: int) -> None:
        if version != self.state_version:
            raise StateNotUsableError(f"expected state version {self.state_version}, found {version}")
        self.characters = msgspec.json.decode(state)["characters"]


class Forgetful:
    """The same, without a state to give."""

    def __init__(self, scorer: Scorer | None = None, settings: RolloutSettings | None = None) -> None:
        pass

    def begin(self, item: Item) -> Episode:
        return ForgetfulEpisode()


class ForgetfulEpisode:
    def __init__(self) -> None:
        self._episode = TallyEpisode()

    async def judge(self, answer: str, *, call: int) -> Verdict:
        return await self._episode.judge(answer, call=call)
