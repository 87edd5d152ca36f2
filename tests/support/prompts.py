"""A `PromptPreparer` without a model, and Hugging Face's own ids to compare it with."""

from __future__ import annotations

from typing import Any

import pytest
from support.tokenizers import CHAT_TEMPLATE, byte_level
from transformers import PreTrainedTokenizerBase

from mini_infer.engines.api import ChatMessage, ModelInfo, Request
from mini_infer.engines.errors import InvalidRequest
from mini_infer.engines.preparation import BUILT_IN_SAMPLING
from mini_infer.engines.prompt import PromptPreparer

CONTEXT = 100
LLAMA2_TEMPLATE = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must\nalternate user/assistant!') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Unknown role ' + m.role) }}{% endif %}{% endfor %}"
)


def preparer(tokenizer: PreTrainedTokenizerBase | None = None, **facts: Any) -> PromptPreparer:
    info: dict[str, Any] = {
        "source": "test",
        "context_length": CONTEXT,
        "vocab_size": 600,
        "dtype": "float32",
        "eos_token_ids": (256,),
        "has_chat_template": True,
        "default_sampling": BUILT_IN_SAMPLING,
    }
    return PromptPreparer(tokenizer=tokenizer or byte_level(CHAT_TEMPLATE), info=ModelInfo(**info | facts))


def refusal(request: Request, text: PromptPreparer) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        text.prepare(request)
    assert "\n" not in caught.value.message
    return caught.value


def user(content: str, role: str = "user") -> tuple[ChatMessage, ...]:
    return (ChatMessage(role, content),)


def of_hugging_face(tokenizer: PreTrainedTokenizerBase, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    ids: Any = tokenizer.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True)
    return tuple(ids["input_ids"])


CONVERSATIONS = [
    user("Hello"),
    user(""),
    user("  spaces around \n\n"),
    (ChatMessage("user", "What is 2+2?"), ChatMessage("assistant", "4"), ChatMessage("user", "Sure?\n👋")),
]
