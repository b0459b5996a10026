"""Whatever an agent does with its conversations, its calls verify, and what the policy sampled is what carries loss."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_captured import surviving, trained_row
from kinlog_chat import PLAIN, REWRITING, chat_tokenizer

from kinlog.schemas.reasons import FinishReason
from kinlog.schemas.settings import GenerationSettings
from kinlog.workers.agent_session import AgentSession
from kinlog.workers.engines import Completion, GeneratedTokens, GenerationRequest
from kinlog.workers.model_calls import CapturedCall, ModelCalls
from kinlog.workers.tokenizer import ChatMessage, Tokenizer

#: A reply that was cut off ends with it, and no other has it: what has another end has another text.
CUT_OFF = "+"


@dataclass(frozen=True)
class Step:
    """What an agent asks next."""

    kind: str
    """``new``: a conversation of its own. ``go_on``: after an earlier reply. ``again``: what was asked before.
    ``edited``: after an earlier reply that the agent has changed."""
    place: int
    """Which of the earlier calls, counted round."""
    said: str


@dataclass(frozen=True)
class Asked:
    """What an agent asked, and what it was answered."""

    messages: tuple[ChatMessage, ...]
    reply: str
    chain: tuple[str, ...]
    """The replies that the policy gave in this conversation, as far as the agent left it alone."""


class RandomEngine:
    """Samples tokens that no tokenizer would encode, and takes uneven time for it."""

    weight_version = 3
    failure = None

    def __init__(self, tokenizer: Tokenizer, replies: Sequence[tuple[list[int], bool]]) -> None:
        self._tokenizer = tokenizer
        self._replies = list(replies)
        self._asked = 0

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        token_ids, cut_off = self._replies[self._asked % len(self._replies)]
        self._asked += 1
        for _ in range(len(token_ids) % 3):
            await asyncio.sleep(0)
        end = self._tokenizer.encode(CUT_OFF) if cut_off else [self._tokenizer.eos_id]
        sampled = torch.tensor([*token_ids, *end])
        return Completion(
            token_ids=sampled,
            logprobs=-sampled.float() - self._asked,
            weight_versions=torch.full(sampled.shape, self.weight_version, dtype=torch.int32),
            finish_reason=FinishReason.LENGTH if cut_off else FinishReason.STOP,
        )

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        raise AssertionError("a rollout never updates weights")

    async def close(self) -> None:
        return None


TEXTS = st.text("12abcd=", max_size=3)
STEPS = st.builds(
    Step,
    kind=st.sampled_from(["new", "go_on", "go_on", "go_on", "again", "edited"]),
    place=st.integers(0, 7),
    said=TEXTS,
)
#: Of some steps, two at the same time.
PROGRAMS = st.lists(st.lists(STEPS, min_size=1, max_size=2), min_size=1, max_size=6)
#: Token ids of "0" to "cd" and of the marks, without the end token, padding and what marks a cut.
REPLIES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([2, 3, 11, 12, 13, 14, 38, 44, 45, 46, 47]), max_size=4), st.booleans()
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        template: chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
        for template in (PLAIN, REWRITING)
    }


def messages_of(step: Step, asked: Sequence[Asked]) -> tuple[ChatMessage, ...]:
    if step.kind == "new" or not asked:
        return (ChatMessage("system", "a"), ChatMessage("user", step.said))
    earlier = asked[step.place % len(asked)]
    if step.kind == "again":
        return earlier.messages
    reply = "-" + earlier.reply if step.kind == "edited" else earlier.reply
    return (*earlier.messages, ChatMessage("assistant", reply), ChatMessage("tool", step.said))


def chain_before(messages: tuple[ChatMessage, ...], asked: Sequence[Asked]) -> tuple[str, ...]:
    """The policy's own replies that a conversation goes on from: those of the longest that it repeats."""
    conversations = [((*one.messages, ChatMessage("assistant", one.reply)), one.chain) for one in asked]
    repeated = [(len(said), chain) for said, chain in conversations if messages[: len(said)] == said]
    longest = max((length for length, _ in repeated), default=0)
    return next((chain for length, chain in reversed(repeated) if length == longest), ())


async def converse(
    tokenizer: Tokenizer, program: Sequence[Sequence[Step]], replies: Sequence[tuple[list[int], bool]]
) -> tuple[list[CapturedCall], list[Asked]]:
    calls = ModelCalls(RandomEngine(tokenizer, replies), GenerationSettings(max_new_tokens=5), seed=1)
    session = AgentSession(calls, tokenizer)
    asked: list[Asked] = []

    async def ask(messages: tuple[ChatMessage, ...], chain: tuple[str, ...]) -> None:
        reply = await session.reply(session.chat_prompt(messages), max_new_tokens=None)
        asked.append(Asked(messages, reply.text, (*chain, reply.text)))

    for steps in program:
        conversations = [messages_of(step, asked) for step in steps]
        await asyncio.gather(*(ask(messages, chain_before(messages, asked)) for messages in conversations))
    return calls.captured, asked


def check_row(calls: list[CapturedCall]) -> None:
    row = trained_row(calls)  # verifies lengths, digests, and that each call begins with its parent
    chain = surviving(calls)
    sampled = torch.cat([call.completion.token_ids for call in chain])
    assert torch.equal(row.token_ids[row.loss_mask], sampled)
    assert torch.equal(row.logprobs[row.loss_mask], torch.cat([call.completion.logprobs for call in chain]))
    assert torch.equal(row.token_ids, torch.cat([chain[-1].prompt_token_ids, chain[-1].completion.token_ids]))
    assert bool((row.weight_versions[~row.loss_mask] == -1).all())
    assert bool((row.logprobs[~row.loss_mask] == 0).all())


@settings(max_examples=60, deadline=None)
@given(program=PROGRAMS, replies=REPLIES, template=st.sampled_from([PLAIN, REWRITING]))
def test_calls_verify_and_exactly_the_sampled_tokens_of_the_surviving_chain_carry_loss(
    tokenizers: dict[str, Tokenizer], program, replies, template
):
    calls, _ = asyncio.run(converse(tokenizers[template], program, replies))
    for end in range(1, len(calls) + 1):
        check_row(calls[:end])


@settings(max_examples=60, deadline=None)
@given(program=PROGRAMS, replies=REPLIES)
def test_conversation_that_the_agent_leaves_alone_is_trained_as_one(
    tokenizers: dict[str, Tokenizer], program, replies
):
    calls, asked = asyncio.run(converse(tokenizers[PLAIN], program, replies))
    for end in range(1, len(calls) + 1):
        chain = surviving(calls[:end])
        replied = tuple(tokenizers[PLAIN].decode(call.completion.token_ids.tolist()) for call in chain)
        assert replied == asked[end - 1].chain
