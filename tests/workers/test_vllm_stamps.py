"""Tokens are stamped with the version that vLLM labelled them with, however late they are read here.

vLLM's side is played: that a token is read after the weights have changed cannot be brought about from outside.
"""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.vllm_engine import ServedModel, VllmEngine


class Outputs:
    """What vLLM made, merged as it is when nobody has read for a while."""

    request_id = "one"

    def __init__(self, *outputs: Any) -> None:
        self._outputs = list(outputs)

    async def get(self) -> Any:
        await asyncio.sleep(0)
        return self._outputs.pop(0)


def output(token_ids: Sequence[int], *, spans: Sequence[tuple[str, int]] = (), finished: bool = False) -> Any:
    completion = SimpleNamespace(
        token_ids=token_ids,
        logprobs=[{token_id: SimpleNamespace(logprob=-float(token_id))} for token_id in token_ids],
        weight_versions=[SimpleNamespace(version=version, start=start) for version, start in spans],
    )
    return SimpleNamespace(outputs=[completion], finished=finished)


def collected(
    outputs: Outputs, starts: list[tuple[str, int]] | None, before: GeneratedTokens
) -> GeneratedTokens:
    states = {} if starts is None else {"one": SimpleNamespace(weight_version_starts=starts)}
    llm = SimpleNamespace(output_processor=SimpleNamespace(request_states=states), errored=False)
    engine = VllmEngine(llm, ServedModel(2, 20, 160, {}), weight_version=9)  # long after

    async def collect() -> None:
        await engine._collect(outputs, before)

    asyncio.run(collect())
    return before


@pytest.mark.parametrize("before", [0, 3])
def test_tokens_of_two_versions_that_are_read_at_once_keep_their_own(before: int):
    earlier = GeneratedTokens([7] * before, [-7.0] * before, [1] * before)
    outputs = Outputs(output([4, 5, 6]), output([8, 9], spans=[("3", 0), ("4", 2), ("6", 4)], finished=True))
    tokens = list(collected(outputs, [("3", 0), ("4", 2)], earlier))[before:]
    assert tokens == [(4, -4.0, 3), (5, -5.0, 3), (6, -6.0, 4), (8, -8.0, 4), (9, -9.0, 6)]


def test_request_that_had_ended_before_it_was_looked_at_is_stamped_by_its_last_output():
    outputs = Outputs(output([4, 5], spans=[("3", 0), ("4", 1)], finished=True))
    assert list(collected(outputs, None, GeneratedTokens())) == [(4, -4.0, 3), (5, -5.0, 4)]
