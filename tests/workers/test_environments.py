import pytest

from kinlog.schemas.settings import RolloutSettings
from kinlog.workers.environments import Retry, SingleTurn

pytest_plugins = ["kinlog_policy_fixtures"]

SETTINGS = RolloutSettings(max_turns=3, retry_discount=0.5)


class FixedScorer:
    def __init__(self, score):
        self._score = score

    def score(self, item, answer):
        return self._score


async def test_single_turn_ends_after_one_call_whatever_the_score(mixture):
    for score in (0.0, 1.0):
        episode = SingleTurn(FixedScorer(score), SETTINGS).begin(mixture[0])
        verdict = await episode.judge("1", call=0)
        assert (verdict.reward, verdict.feedback) == (score, None)


async def test_retry_gives_feedback_until_the_turns_are_spent(mixture):
    episode = Retry(FixedScorer(0.25), SETTINGS).begin(mixture[0])
    verdicts = [await episode.judge("1", call=call) for call in range(3)]
    assert [verdict.feedback is None for verdict in verdicts] == [False, False, True]


async def test_retry_ends_at_a_right_answer_discounted_by_its_turn(mixture):
    episode = Retry(FixedScorer(1.0), SETTINGS).begin(mixture[0])
    verdicts = [await episode.judge("1", call=call) for call in range(3)]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.5, 0.25]
    assert all(verdict.feedback is None for verdict in verdicts)


@pytest.mark.parametrize(
    ("answer", "well_formed"), [("12", True), ("-3", True), ("", False), ("1,2", False), ("3?", False)]
)
async def test_only_integers_are_well_formed(mixture, answer, well_formed):
    episode = SingleTurn(FixedScorer(0.0), SETTINGS).begin(mixture[0])
    assert (await episode.judge(answer, call=0)).well_formed is well_formed
