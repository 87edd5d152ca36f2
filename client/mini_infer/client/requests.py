"""The one place where keywords become protobuf requests. Checks types and number ranges of fields, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar

from mini_infer.client.errors import FieldViolation, InvalidArgument
from mini_infer.v1 import generation_pb2 as pb

_Request = TypeVar("_Request")


class Message(TypedDict):
    """One message of a conversation; the role is usually "system", "user" or "assistant"."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """The keywords of `Client.stream` and `Client.generate`: the fields of GenerateRequest, with its defaults.

    Ranges and defaults are told at the fields of ``generation.proto``; None is the same as leaving a keyword out.
    Exactly one of ``prompt``, ``prompt_token_ids`` and ``messages`` must be given.
    """

    prompt: str | None
    prompt_token_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    model: str | None
    request_id: str | None  # the caller's own label
    # sampling
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    # stop
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: Sequence[str] | None  # stop.strings
    stop_token_ids: Sequence[int] | None  # stop.token_ids
    ignore_eos: bool | None
    include_stop_string: bool | None
    # output
    output_token_ids: bool | None  # output.token_ids
    logprobs: bool | None
    top_logprobs: int | None
    skip_special_tokens: bool | None
    # placement
    engine_id: str | None
    engine_kind: Literal["generate", "replica", "pipeline", "scripted"] | None
    session_id: str | None
    priority: int | None
    # the wait in the queue, in seconds
    max_queue_duration_s: float | None


PATHS = {
    "prompt": "prompt",
    "prompt_token_ids": "prompt_token_ids.ids",
    "messages": "chat.messages",
    "model": "model",
    "request_id": "request_id",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "seed": "sampling.seed",
    "logit_bias": "sampling.logit_bias",
    "max_new_tokens": "stop.max_new_tokens",
    "min_new_tokens": "stop.min_new_tokens",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "ignore_eos": "stop.ignore_eos",
    "include_stop_string": "stop.include_stop_string",
    "output_token_ids": "output.token_ids",
    "logprobs": "output.logprobs",
    "top_logprobs": "output.top_logprobs",
    "skip_special_tokens": "output.skip_special_tokens",
    "engine_id": "placement.engine_id",
    "engine_kind": "placement.engine_kind",
    "session_id": "placement.session_id",
    "priority": "placement.priority",
    "max_queue_duration_s": "max_queue_duration",
}
"""Keyword to path in GenerateRequest; all of its fields."""


def generate_request(options: GenerateOptions) -> pb.GenerateRequest:
    """Raises `InvalidArgument` for values that a field cannot hold and `TypeError` for unknown keywords."""
    if unknown := options.keys() - PATHS.keys():
        raise TypeError(f"unknown keyword: {', '.join(sorted(unknown))}")
    given = {name: value for name, value in options.items() if value is not None}
    inputs = [name for name in ("prompt", "prompt_token_ids", "messages") if name in given]
    if len(inputs) != 1:
        raise invalid("input", f"give exactly one of prompt, prompt_token_ids and messages, not {inputs or 'none'}")
    return fill(pb.GenerateRequest(), {PATHS[name]: value for name, value in given.items()})


def may_queue(request: pb.GenerateRequest) -> bool:
    """Whether it may wait for its turn; with a longest wait of 0 it is to start at once or be refused."""
    return not request.HasField("max_queue_duration") or request.max_queue_duration.ToNanoseconds() != 0


def fill(request: _Request, values: Mapping[str, Any]) -> _Request:
    """Sets fields by their paths; None leaves one out. Raises `InvalidArgument` for values that a field cannot hold."""
    for path, value in values.items():
        if value is not None:
            _set(request, path, value)
    return request


def invalid(field: str, description: str) -> InvalidArgument:
    """The error for a field that this side can already refuse."""
    return InvalidArgument(description, reason="INVALID_FIELD", field_violations=(FieldViolation(field, description),))


def _set(request: Any, path: str, value: Any) -> None:
    """Sets a field by its path; that it is present is kept even where the value is the field's zero."""
    *parents, field = path.split(".")
    target = request
    for parent in parents:
        target = getattr(target, parent)
        target.SetInParent()
    try:
        _assign(target, field, value)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:  # also for lone surrogates
        raise invalid(path, f"cannot be {_shorten(value)}: {error}") from error


def _assign(target: Any, field: str, value: Any) -> None:
    if field == "messages":
        target.messages.extend(pb.ChatMessage(role=said["role"], content=said["content"]) for said in value)
    elif field == "logit_bias":
        target.logit_bias.update(value)
    elif field == "engine_kind":
        target.engine_kind = _engine_kind(value)
    elif field == "max_queue_duration":
        target.max_queue_duration.FromTimedelta(timedelta(seconds=value))
    elif field in ("ids", "strings", "request_ids") or (field == "token_ids" and not isinstance(value, bool)):
        _refuse_bare_string(value)
        getattr(target, field).extend(value)
    else:
        setattr(target, field, value)


def _engine_kind(word: str) -> int:
    kinds = {name.removeprefix("ENGINE_KIND_").lower(): number for name, number in pb.EngineKind.items() if number}
    if word.lower() not in kinds:
        raise ValueError(f"the kinds are {', '.join(kinds)}")
    return kinds[word.lower()]


def _refuse_bare_string(value: Any) -> None:
    """A string is a sequence too; ``stop="END"`` would quietly mean the three stop strings E, N and D."""
    if isinstance(value, str):
        raise TypeError("a list is wanted")


def _shorten(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
