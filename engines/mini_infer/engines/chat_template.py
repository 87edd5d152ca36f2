"""A conversation to token ids through the model's chat template. Knows nothing of limits or sampling."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from mini_infer.engines.api import ChatMessage
from mini_infer.engines.control_tokens import ControlTokenGuard, ControlTokens
from mini_infer.engines.errors import InvalidRequest, StreamFailed, one_line

_log = logging.getLogger(__name__)


class ChatEncoder:
    """Lays out conversations for one tokenizer. Safe from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encode: Callable[[str], tuple[int, ...]]) -> None:
        """``encode`` gives the ids of a text without adding any."""
        self._tokenizer = tokenizer
        self._encode = encode
        self._template = template_of(tokenizer)
        self._control = ControlTokens.of(tokenizer, self._template or "")
        self._typed_by_assistant, self._typed_by_others = map(self._control.pattern, ("assistant", "user"))
        self._guard: ControlTokenGuard | InvalidRequest | None = None
        self._guard_lock = threading.Lock()
        # A control token that is matched after normalizing can be typed in ways that a plain search does not see.
        control = {*self._control.special, *self._control.written}
        added = tokenizer.added_tokens_decoder.values()
        self._always_guard = any(token.normalized for token in added if token.content in control) and self._can_guard()

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of a conversation, up to where the assistant's answer begins.

        The template's text is tokenized without adding tokens, so a template that writes the begin token does not
        get it twice. Control tokens typed in a message are plain text.

        Raises:
            InvalidRequest: There is no template, no message, or the template refuses the conversation.
            StreamFailed: The template is broken.
        """
        if self._template is None:
            raise InvalidRequest("chat", "this model has no chat template: send a prompt instead", "NO_CHAT_TEMPLATE")
        if not messages:
            raise InvalidRequest("chat", "must hold at least one message")
        if not self._always_guard and not any(map(self._mentions_control, messages)):
            return self._encode(self._render(messages))
        guard = self._guard_or_refuse()
        masked = [
            ChatMessage(
                guard.mask(message.role, self._typed_by_others), guard.mask(message.content, self._typed_by(message))
            )
            for message in messages
        ]
        return guard.encode(self._render(masked))

    def _mentions_control(self, message: ChatMessage) -> bool:
        return bool(self._typed_by_others.search(message.role) or self._typed_by(message).search(message.content))

    def _typed_by(self, message: ChatMessage) -> re.Pattern[str]:
        return self._typed_by_assistant if message.role == "assistant" else self._typed_by_others

    def _can_guard(self) -> bool:
        try:
            self._guard_or_refuse()
        except InvalidRequest as error:
            _log.warning(
                "control tokens that only match after normalizing are not recognised in messages: a chat that %s",
                error.message,
            )
            return False
        return True

    def _guard_or_refuse(self) -> ControlTokenGuard:
        """The guard, built on first use and once, because the copy of a large tokenizer takes a second."""
        with self._guard_lock:
            if self._guard is None:
                try:
                    self._guard = ControlTokenGuard(self._tokenizer, self._control)
                except ValueError as error:
                    self._guard = InvalidRequest("chat", f"holds a control token, and {error}")
        if isinstance(self._guard, InvalidRequest):
            raise InvalidRequest(self._guard.field, self._guard.message)
        return self._guard

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except TemplateSyntaxError as error:
            raise StreamFailed(f"the model's chat template is broken: {one_line(error)}") from error
        except TemplateError as error:
            raise InvalidRequest("chat", f"the model's chat template refuses this: {one_line(error)}") from error
        except Exception as error:  # a template is a program of its own and may raise anything
            raise StreamFailed(f"the model's chat template failed: {one_line(error)}") from error
        assert isinstance(text, str)
        return text


def template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The source of the template that conversations go through, or None."""
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # several named templates, and none is the default
        return None
