"""What a request means for one model: its ids and limits checked, every default filled in. Knows no tokenizer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import fields, replace

from mini_infer.engines.api import (
    ChatMessage,
    FinishReason,
    ModelInfo,
    PreparedRequest,
    Request,
    Sampling,
    StopConditions,
)
from mini_infer.engines.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 512

BUILT_IN_SAMPLING = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)

Tokenize = Callable[[str | tuple[ChatMessage, ...]], tuple[int, ...]]
"""`TextModel.tokenize`."""


def prepare_request(request: Request, tokenize: Tokenize, info: ModelInfo) -> PreparedRequest:
    """Tokenizes and checks a request. Raises `InvalidRequest`, and whatever ``tokenize`` raises."""
    check_ids("stop.token_ids", request.stop.token_ids, info)
    check_ids("sampling.logit_bias", request.sampling.logit_bias, info)
    field, prompt_ids = _prompt_ids(request, tokenize)
    check_ids(field, prompt_ids, info)
    context_left = info.context_length - len(prompt_ids)
    if context_left < 1:
        raise InvalidRequest(
            field,
            f"the prompt has {len(prompt_ids)} tokens, and the context of {info.context_length} tokens "
            "must hold it and at least one more",
            "PROMPT_TOO_LONG",
        )
    stop, limit_reason = _fit_stop(request.stop, context_left)
    return PreparedRequest(
        key=request.key,
        prompt_ids=prompt_ids,
        sampling=_with_seed(overlay(request.sampling, info.default_sampling)),
        stop=stop,
        eos_token_ids=frozenset() if stop.ignore_eos else frozenset(info.eos_token_ids),
        limit_reason=limit_reason,
        output=request.output,
        deadline_ns=request.deadline_ns,
    )


def check_ids(field: str, ids: Iterable[int], info: ModelInfo) -> None:
    """Raises `InvalidRequest` for the first id that is outside the model's vocabulary."""
    bad = next((token_id for token_id in ids if not 0 <= token_id < info.vocab_size), None)
    if bad is not None:
        raise InvalidRequest(field, f"token id {bad} is outside the model's vocabulary, 0 to {info.vocab_size - 1}")


def overlay(upper: Sampling, lower: Sampling) -> Sampling:
    """``upper`` where it says something, else ``lower``."""
    said = {field.name: value for field in fields(Sampling) if (value := getattr(upper, field.name)) not in (None, {})}
    return replace(lower, **said)


def _prompt_ids(request: Request, tokenize: Tokenize) -> tuple[str, tuple[int, ...]]:
    """The field that the prompt came from, and its ids, at least one."""
    if request.chat is not None:
        field, ids = "chat", tokenize(request.chat)
    elif request.prompt_token_ids is not None:
        field, ids = "prompt_token_ids.ids", request.prompt_token_ids
    else:
        field, ids = "prompt", tokenize(request.prompt or "")
    if not ids:
        raise InvalidRequest(field, "the prompt is empty, and this model's tokenizer adds no token of its own")
    return field, ids


def _fit_stop(asked: StopConditions, context_left: int) -> tuple[StopConditions, FinishReason]:
    """Stop conditions with a limit that the context can hold, and what running into that limit means."""
    wanted = DEFAULT_MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    if asked.min_new_tokens > wanted:
        raise InvalidRequest(
            "stop.min_new_tokens", f"must be at most max_new_tokens, {wanted}, not {asked.min_new_tokens}"
        )
    limit = min(wanted, context_left)
    stop = replace(asked, max_new_tokens=limit, min_new_tokens=min(asked.min_new_tokens, limit))
    return stop, FinishReason.CONTEXT_LENGTH if limit < wanted else FinishReason.MAX_NEW_TOKENS


def _with_seed(sampling: Sampling) -> Sampling:
    """A seed for sampling, drawn where none was given; none for greedy decoding, which needs none."""
    if sampling.is_greedy:
        return replace(sampling, seed=None)
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(64))
