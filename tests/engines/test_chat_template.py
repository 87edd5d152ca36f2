"""Conversations against Hugging Face's own ids, and templates that refuse or break."""

from __future__ import annotations

import pytest
from support.prompts import CONVERSATIONS, LLAMA2_TEMPLATE, of_hugging_face, preparer, refusal, user
from support.tokenizers import CHAT_TEMPLATE, ZOO, byte_level, sentencepiece_like

from mini_infer.engines.api import ChatMessage, Request
from mini_infer.engines.errors import InvalidRequest, StreamFailed

TEXT = preparer()


@pytest.mark.floor
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA2_TEMPLATE])
@pytest.mark.parametrize("name", [name for name in ZOO if name != "word_level"])
def test_conversations_are_those_of_hugging_face(
    name: str, template: str, conversation: tuple[ChatMessage, ...]
) -> None:
    tokenizer = ZOO[name](template)
    if tokenizer.bos_token is None:
        tokenizer.bos_token = tokenizer.eos_token
    expected = of_hugging_face(tokenizer, conversation)
    assert preparer(tokenizer, vocab_size=10_000).tokenize(conversation) == expected


def test_begin_token_is_not_doubled() -> None:
    text = preparer(sentencepiece_like(LLAMA2_TEMPLATE))
    assert text.tokenize("Hi").count(1) == 1
    assert text.prepare(Request(key="k", chat=user("Hi"))).prompt_ids.count(1) == 1


def test_no_chat_template_is_said_and_prompts_work() -> None:
    text = preparer(byte_level())
    error = refusal(Request(key="k", chat=user("Hi")), text)
    assert (error.field, error.reason) == ("chat", "NO_CHAT_TEMPLATE")
    assert text.prepare(Request(key="k", prompt="Hi")).prompt_ids
    with pytest.raises(InvalidRequest, match="no chat template"):
        text.tokenize(user("Hi"))


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        ((ChatMessage("assistant", "Hi"),), "Roles must alternate user/assistant!"),
        ((ChatMessage("user", "Hi"), ChatMessage("wizard", "Ho")), "Unknown role wizard"),
    ],
)
def test_what_the_template_refuses(conversation: tuple[ChatMessage, ...], expected: str) -> None:
    error = refusal(Request(key="k", chat=conversation), preparer(sentencepiece_like(LLAMA2_TEMPLATE)))
    assert error.field == "chat"
    assert expected in error.message


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ range(10**9) }}"]
)
def test_broken_template_fails_the_stream_alone(template: str) -> None:
    with pytest.raises(StreamFailed, match="chat template") as caught:
        preparer(byte_level(template)).tokenize(user("Hi"))
    assert "\n" not in caught.value.message


def test_several_named_templates() -> None:
    named = preparer(byte_level({"default": CHAT_TEMPLATE, "tools": "x"}))  # type: ignore[arg-type]
    assert named.tokenize(user("Hi")) == TEXT.tokenize(user("Hi"))
    nameless = preparer(byte_level({"a": CHAT_TEMPLATE, "b": "x"}))  # type: ignore[arg-type]
    assert refusal(Request(key="k", chat=user("Hi")), nameless).reason == "NO_CHAT_TEMPLATE"
