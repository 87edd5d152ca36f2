"""From protobuf requests to our own words, with every check that needs no model. Pure; knows no gRPC.

A wrong value raises `InvalidRequest` with the path of its field in the message and the range that it must keep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration

from mini_infer.engines.api import ChatMessage, EngineKind, OutputOptions, Request, Sampling, StopConditions
from mini_infer.engines.errors import InvalidRequest
from mini_infer.server.call import Call
from mini_infer.v1 import generation_pb2 as pb

MAX_PROMPT_BYTES = 1 << 20
MAX_TOKEN_IDS = 1 << 20
MAX_LABEL_BYTES = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_CANCEL_IDS = 1024
MAX_QUEUE_NS = 24 * 3600 * 10**9

ENGINE_KINDS = {
    pb.ENGINE_KIND_GENERATE: EngineKind.GENERATE,
    pb.ENGINE_KIND_REPLICA: EngineKind.REPLICA,
    pb.ENGINE_KIND_PIPELINE: EngineKind.PIPELINE,
    pb.ENGINE_KIND_SCRIPTED: EngineKind.SCRIPTED,
}

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_SAMPLING_RANGES = {  # low, high, whether it must be above low
    "temperature": (0, 100, False),
    "top_p": (0, 1, True),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, 100, True),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
}
_SAMPLING_SCALARS = (*_SAMPLING_RANGES, "top_k", "seed")


def call_of(message: pb.GenerateRequest, *, key: str, caller: str, arrival_ns: int, deadline_ns: int | None) -> Call:
    """A generation call. ``key`` is the server's own id; instants are monotonic nanoseconds."""
    placement = message.placement
    if placement.priority:
        raise InvalidRequest("placement.priority", "must be 0: priorities are reserved for a later version")
    return Call(
        request=_request(message, key, deadline_ns),
        caller=caller,
        arrival_ns=arrival_ns,
        model=message.model,
        label=_label("request_id", message.request_id),
        engine_id=_engine_id(placement),
        engine_kind=_engine_kind(placement),
        session_id=_label("placement.session_id", placement.session_id),
        max_queue_ns=_max_queue_ns(message),
    )


def check_sampling(sampling: Sampling) -> None:
    """Raises `InvalidRequest` for the first value that is out of its range; what is not said is not checked."""
    for name, (low, high, above) in _SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        if value is not None:
            _require_range(f"sampling.{name}", value, low, high, above=above)
    for token_id, bias in sampling.logit_bias.items():
        _require_range(f"sampling.logit_bias[{token_id}]", bias, -100, 100)


def text_of(message: pb.TokenizeRequest) -> str | tuple[ChatMessage, ...]:
    """What is to be tokenized."""
    match message.WhichOneof("input"):
        case "text":
            return _prompt("text", message.text)
        case "chat":
            return _chat(message.chat)
        case _:
            raise InvalidRequest("input", "one of text and chat must be given")


def token_ids_of(message: pb.DetokenizeRequest) -> tuple[int, ...]:
    """What is to be detokenized."""
    _require_count("token_ids", message.token_ids, 0, MAX_TOKEN_IDS)
    return tuple(message.token_ids)


def skip_special_tokens_of(message: pb.DetokenizeRequest | pb.OutputOptions) -> bool:
    """Whether special tokens stay out of the text; they do where nothing is said."""
    return message.skip_special_tokens if message.HasField("skip_special_tokens") else True


def cancel_ids_of(message: pb.CancelGenerationRequest) -> tuple[str, ...]:
    """Which generations are to end, each named once."""
    _require_count("request_ids", message.request_ids, 1, MAX_CANCEL_IDS)
    return tuple(dict.fromkeys(message.request_ids))


def _request(message: pb.GenerateRequest, key: str, deadline_ns: int | None) -> Request:
    source = message.WhichOneof("input")
    if source is None:
        raise InvalidRequest("input", "one of prompt, prompt_token_ids and chat must be given")
    return Request(
        key=key,
        prompt=_prompt("prompt", message.prompt) if source == "prompt" else None,
        prompt_token_ids=_prompt_token_ids(message.prompt_token_ids) if source == "prompt_token_ids" else None,
        chat=_chat(message.chat) if source == "chat" else None,
        sampling=_sampling(message.sampling),
        stop=_stop(message.stop),
        output=_output(message.output),
        deadline_ns=deadline_ns,
    )


def _prompt(field: str, text: str) -> str:
    # Not encoded where its length alone tells: that would copy it.
    if len(text) > MAX_PROMPT_BYTES or len(text.encode()) > MAX_PROMPT_BYTES:
        raise InvalidRequest(field, f"must be at most {MAX_PROMPT_BYTES:,} bytes")
    return text


def _prompt_token_ids(message: pb.TokenIds) -> tuple[int, ...]:
    _require_count("prompt_token_ids.ids", message.ids, 1, MAX_TOKEN_IDS)
    return tuple(message.ids)


def _chat(message: pb.Chat) -> tuple[ChatMessage, ...]:
    if not message.messages:
        raise InvalidRequest("chat.messages", "must hold at least one message")
    num_bytes = message.ByteSize()
    if num_bytes > MAX_PROMPT_BYTES:
        raise InvalidRequest("chat", f"must be at most {MAX_PROMPT_BYTES:,} bytes, not {num_bytes:,}")
    for index, each in enumerate(message.messages):
        if not _ROLE.fullmatch(each.role):
            raise InvalidRequest(
                f"chat.messages[{index}].role", 'must be 1 to 64 characters: ASCII letters, digits, "_", "-" and "."'
            )
    return tuple(ChatMessage(each.role, each.content) for each in message.messages)


def _sampling(message: pb.SamplingParams) -> Sampling:
    _require_count("sampling.logit_bias", message.logit_bias, 0, MAX_LOGIT_BIAS)
    said = {name: getattr(message, name) for name in _SAMPLING_SCALARS if message.HasField(name)}
    sampling = Sampling(**said, logit_bias=dict(message.logit_bias))
    check_sampling(sampling)
    return sampling


def _stop(message: pb.StopConditions) -> StopConditions:
    max_new_tokens = message.max_new_tokens if message.HasField("max_new_tokens") else None
    min_new_tokens = message.min_new_tokens
    if max_new_tokens == 0:
        raise InvalidRequest("stop.max_new_tokens", "must be 1 or more, not 0")
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise InvalidRequest(
            "stop.min_new_tokens", f"must be from 0 to max_new_tokens ({max_new_tokens}), not {min_new_tokens}"
        )
    _require_count("stop.strings", message.strings, 0, MAX_STOP_STRINGS)
    for index, string in enumerate(message.strings):
        num_bytes = len(string.encode())
        if not 1 <= num_bytes <= MAX_STOP_STRING_BYTES:
            raise InvalidRequest(
                f"stop.strings[{index}]", f"must be 1 to {MAX_STOP_STRING_BYTES:,} bytes, not {num_bytes:,}"
            )
    _require_count("stop.token_ids", message.token_ids, 0, MAX_STOP_TOKEN_IDS)
    return StopConditions(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        strings=tuple(message.strings),
        token_ids=tuple(message.token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_string=message.include_stop_string,
    )


def _output(message: pb.OutputOptions) -> OutputOptions:
    if message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest("output.top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, not {message.top_logprobs}")
    if message.top_logprobs and not message.logprobs:
        raise InvalidRequest("output.top_logprobs", "must be 0 unless output.logprobs is true")
    return OutputOptions(
        token_ids=message.token_ids,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        skip_special_tokens=skip_special_tokens_of(message),
    )


def _engine_id(message: pb.Placement) -> str | None:
    if message.WhichOneof("pin") != "engine_id":
        return None
    if not message.engine_id:
        raise InvalidRequest("placement.engine_id", "must not be empty")
    return message.engine_id


def _engine_kind(message: pb.Placement) -> EngineKind | None:
    if message.engine_kind == pb.ENGINE_KIND_UNSPECIFIED:
        return None
    if message.engine_kind not in ENGINE_KINDS:
        raise InvalidRequest("placement.engine_kind", f"must be a kind of EngineKind, not {message.engine_kind}")
    return ENGINE_KINDS[message.engine_kind]


def _max_queue_ns(message: pb.GenerateRequest) -> int | None:
    if not message.HasField("max_queue_duration"):
        return None
    duration: Duration = message.max_queue_duration
    total_ns = duration.seconds * 10**9 + duration.nanos
    if not (0 <= duration.nanos < 10**9 and 0 <= total_ns <= MAX_QUEUE_NS):
        raise InvalidRequest(
            "max_queue_duration",
            f"must be from 0 s to 24 h, not {duration.seconds} s and {duration.nanos} ns",
        )
    return total_ns


def _label(field: str, text: str) -> str:
    num_bytes = len(text.encode())
    if num_bytes > MAX_LABEL_BYTES:
        raise InvalidRequest(field, f"must be at most {MAX_LABEL_BYTES} bytes, not {num_bytes:,}")
    return text


def _require_range(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        span = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise InvalidRequest(field, f"must be {span}, not {value:.6g}")


def _require_count(field: str, values: Iterable[object], low: int, high: int) -> None:
    num_values = len(values)  # type: ignore[arg-type]  # protobuf's containers have a length, but no common class
    if not low <= num_values <= high:
        raise InvalidRequest(field, f"must hold {low:,} to {high:,} entries, not {num_values:,}")
