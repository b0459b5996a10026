"""From messages to tokens: what was sampled is never encoded again, and what cannot go on begins anew."""

from pathlib import Path

import pytest
import torch
from kinlog_chat import BEGIN, END, REWRITING, STRICT, chat_tokenizer

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.reasons import FinishReason
from kinlog.workers.conversations import Conversations, Prompt
from kinlog.workers.engines import Completion
from kinlog.workers.tokenizer import ChatMessage, Tokenizer

pytest_plugins = ["kinlog_policy_fixtures"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(content: str) -> ChatMessage:
    return ChatMessage("user", content)


def said(content: str) -> ChatMessage:
    return ChatMessage("assistant", content)


def tool(content: str) -> ChatMessage:
    return ChatMessage("tool", content, tool_call_id="1")


def sampled(tokenizer: Tokenizer, text: str, *, ends: bool = True) -> Completion:
    """A completion of one token a character, which is not how the text is encoded."""
    token_ids = [token_id for character in text for token_id in tokenizer.encode(character)]
    token_ids += [tokenizer.eos_id] * ends
    return Completion(
        token_ids=torch.tensor(token_ids),
        logprobs=torch.full((len(token_ids),), -1.0),
        weight_versions=torch.zeros(len(token_ids), dtype=torch.int32),
        finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
    )


def read_and_sampled(prompt: Prompt, completion: Completion) -> list[int]:
    return [*prompt.token_ids, *completion.token_ids.tolist()]


def test_first_prompt_is_the_template_as_it_is(chat: Tokenizer):
    prompt = Conversations(chat).chat_prompt([ChatMessage("system", "ab"), user("12=")])
    text = f"{BEGIN}system\nab{END}\n{BEGIN}user\n12={END}\n{BEGIN}assistant\n"
    assert (prompt.text, prompt.token_ids) == (text, chat.encode(text))


def test_reply_goes_on_as_it_was_sampled_and_not_as_its_text_is_encoded(chat: Tokenizer):
    conversations = Conversations(chat)
    first = conversations.chat_prompt([user("12=")])
    completion = sampled(chat, "abcd12")
    assert conversations.add_reply(first, completion) == "abcd12"
    second = conversations.chat_prompt([user("12="), said("abcd12"), tool("12")])
    begun = read_and_sampled(first, completion)
    assert second.token_ids[: len(begun)] == begun
    rest = f"\n{BEGIN}tool\n12{END}\n{BEGIN}assistant\n"
    assert second.token_ids[len(begun) :] == chat.encode(rest), "the end token is there once"
    assert list(second.token_ids) != chat.encode(second.text)


def test_reply_that_was_cut_off_gets_the_end_that_the_template_writes(chat: Tokenizer):
    conversations = Conversations(chat)
    first = conversations.chat_prompt([user("1")])
    completion = sampled(chat, "ab", ends=False)
    conversations.add_reply(first, completion)
    second = conversations.chat_prompt([user("1"), said("ab"), user("2")])
    assert second.token_ids[len(read_and_sampled(first, completion))] == chat.eos_id


def test_end_token_that_the_template_does_not_write_stays(tokenizer: Tokenizer):
    conversations = Conversations(tokenizer)
    first = conversations.chat_prompt([user("1=")])
    completion = sampled(tokenizer, "2")
    conversations.add_reply(first, completion)
    second = conversations.chat_prompt([user("1="), said("2"), tool("?")])
    assert second.token_ids == [*read_and_sampled(first, completion), *tokenizer.encode("?")]


def test_longest_conversation_that_is_repeated_is_gone_on_from(chat: Tokenizer):
    conversations = Conversations(chat)
    history = [user("1")]
    for turn in range(3):
        prompt = conversations.chat_prompt(history)
        completion = sampled(chat, "ab")
        conversations.add_reply(prompt, completion)
        begun = read_and_sampled(prompt, completion)
        history += [said("ab"), user(str(turn))]
    assert conversations.chat_prompt(history).token_ids[: len(begun)] == begun


def test_of_the_same_reply_given_twice_the_last_is_gone_on_from(chat: Tokenizer):
    conversations = Conversations(chat)
    first = conversations.chat_prompt([user("1")])
    conversations.add_reply(first, sampled(chat, "ab"))
    again = sampled(chat, "ab", ends=False)
    conversations.add_reply(first, again)
    begun = read_and_sampled(first, again)
    assert conversations.chat_prompt([user("1"), said("ab"), user("2")]).token_ids[: len(begun)] == begun


@pytest.mark.parametrize(
    "history",
    [
        [user("1"), said("ba"), user("2")],
        [user("2"), said("ab"), user("2")],
        [ChatMessage("system", "1"), said("ab"), user("2")],
        [user("1"), user("ab"), user("2")],
    ],
    ids=["other_reply", "other_question", "other_role", "reply_in_another_mouth"],
)
def test_other_history_begins_anew(chat: Tokenizer, history: list[ChatMessage]):
    conversations = Conversations(chat)
    conversations.add_reply(conversations.chat_prompt([user("1")]), sampled(chat, "ab"))
    prompt = conversations.chat_prompt(history)
    assert prompt.token_ids == chat.encode(prompt.text)


def test_same_text_in_other_messages_begins_anew(tokenizer: Tokenizer):
    conversations = Conversations(tokenizer)
    conversations.add_reply(conversations.chat_prompt([user("1")]), sampled(tokenizer, "2"))
    assert conversations.chat_prompt([user("12")]).token_ids == tokenizer.encode("12")


def test_history_that_the_template_rewrites_goes_on_from_where_it_still_holds(tmp_path: Path):
    chat = chat_tokenizer(tmp_path, REWRITING)
    conversations = Conversations(chat)
    first = conversations.chat_prompt([user("1")])
    completion = sampled(chat, "ab")
    conversations.add_reply(first, completion)
    history = [user("1"), said("ab"), user("2")]
    conversations.add_reply(conversations.chat_prompt(history), sampled(chat, "12=cd"))
    third = conversations.chat_prompt([*history, said("12=cd"), user("3")])
    begun = read_and_sampled(first, completion)
    assert third.token_ids[: len(begun)] == begun
    assert third.token_ids[len(begun) :] == chat.encode(third.text.split(f"ab{END}", 1)[1])
    assert "12=" not in third.text


def test_history_that_the_template_rewrites_from_its_beginning_begins_anew(tmp_path: Path):
    chat = chat_tokenizer(tmp_path, REWRITING)
    conversations = Conversations(chat)
    conversations.add_reply(conversations.chat_prompt([user("1")]), sampled(chat, "12=ab"))
    second = conversations.chat_prompt([user("1"), said("12=ab"), user("2")])
    assert second.token_ids == chat.encode(second.text)


def test_template_that_refuses_the_messages_is_quoted(tmp_path: Path):
    with pytest.raises(ValueError, match="chat template does not take these messages: no tools"):
        Conversations(chat_tokenizer(tmp_path, STRICT)).chat_prompt([tool("1")])


def test_tokenizer_without_a_template_is_named(tmp_path: Path):
    conversations = Conversations(chat_tokenizer(tmp_path, None))
    with pytest.raises(ConfigError, match=rf"model\.path.*{tmp_path.name}.*no chat template"):
        conversations.chat_prompt([user("1")])
    assert conversations.text_prompt("1").token_ids


def test_text_that_begins_with_an_earlier_one_and_its_reply_goes_on_from_it(chat: Tokenizer):
    conversations = Conversations(chat)
    first = conversations.text_prompt("12=")
    completion = sampled(chat, "ab")
    assert conversations.add_reply(first, completion) == "ab"
    begun = read_and_sampled(first, completion)
    assert conversations.text_prompt(f"12=ab{END}12").token_ids == [*begun, *chat.encode("12")]
    assert conversations.text_prompt("12=cd").token_ids == chat.encode("12=cd")


def test_text_that_is_asked_again_does_not_go_on_from_an_empty_reply(chat: Tokenizer):
    conversations = Conversations(chat)
    conversations.add_reply(conversations.text_prompt("12="), sampled(chat, ""))
    assert conversations.text_prompt("12=").token_ids == chat.encode("12=")


def test_chats_and_texts_do_not_go_on_from_each_other(tokenizer: Tokenizer):
    conversations = Conversations(tokenizer)
    conversations.add_reply(conversations.chat_prompt([user("1")]), sampled(tokenizer, "2"))
    conversations.add_reply(conversations.text_prompt("3"), sampled(tokenizer, "4"))
    assert conversations.text_prompt("12=").token_ids == tokenizer.encode("12=")
    history = [user("3"), said("4"), user("=")]
    assert conversations.chat_prompt(history).token_ids == tokenizer.encode("34=")
