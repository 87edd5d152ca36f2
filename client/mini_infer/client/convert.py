"""From protobuf messages to the dataclasses of `results`. Proto objects stop here."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import UTC

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from mini_infer.client import results
from mini_infer.v1 import admin_pb2
from mini_infer.v1 import generation_pb2 as pb


def started(message: pb.GenerationStarted) -> results.Started:
    """The first event of a stream."""
    return results.Started(
        engine=engine_ref(message.engine),
        queue_s=_seconds(message.queue_duration),
        prompt_tokens=message.prompt_tokens,
    )


def delta(message: pb.GenerationDelta) -> results.Delta:
    """A piece of an answer."""
    return results.Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        num_tokens=message.num_tokens,
        cumulative_tokens=message.cumulative_tokens,
        logprobs=_logprobs(message.logprobs),
        offset_s=_seconds(message.offset),
        first_token=_first_token(message.first_token) if message.HasField("first_token") else None,
    )


def result(
    request_id: str,
    text: str,
    token_ids: Iterable[int],
    logprobs: tuple[results.TokenLogprob, ...],
    finished: pb.GenerationFinished,
) -> results.Result:
    """The end of an answer, put together with what came before it."""
    matched = finished.WhichOneof("matched")
    return results.Result(
        request_id=request_id,
        text=text,
        token_ids=tuple(token_ids),
        logprobs=logprobs,
        finish_reason=_word(pb.FinishReason, finished.reason),
        matched=getattr(finished, matched) if matched else None,
        usage=_usage(finished.usage),
        timing=_timing(finished.timing),
        engine=engine_ref(finished.engine),
        seed=finished.seed if finished.HasField("seed") else None,
    )


def unary_result(response: pb.GenerateResponse) -> results.Result:
    """The answer of the unary call."""
    logprobs = _logprobs(response.logprobs)
    return result(response.request_id, response.text, response.token_ids, logprobs, response.finished)


def engine_ref(message: pb.EngineRef) -> results.EngineRef:
    """Which engine served."""
    return results.EngineRef(
        engine_id=message.engine_id,
        kind=_word(pb.EngineKind, message.kind),
        devices=tuple(message.devices),
        placement_reason=_word(pb.PlacementReason, message.placement_reason),
    )


def engine(message: admin_pb2.EngineStatus) -> results.Engine:
    """An engine as it is now."""
    return results.Engine(
        engine_id=message.engine_id,
        kind=_word(pb.EngineKind, message.kind),
        devices=tuple(message.devices),
        model=message.model,
        state=_word(admin_pb2.EngineState, message.state),
        failure=message.failure,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        max_running=message.max_running,
        generated_tokens=message.generated_tokens,
        since_last_token_s=_seconds(message.since_last_token) if message.HasField("since_last_token") else None,
    )


def model(message: pb.Model) -> results.Model:
    """A served model."""
    sampling = {
        field.name: _decimal(value) if isinstance(value, float) else value
        for field, value in message.default_sampling.ListFields()
    }
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {
            token_id: _decimal(bias) for token_id, bias in message.default_sampling.logit_bias.items()
        }
    return results.Model(
        name=message.name,
        source=message.source,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        dtype=message.dtype,
        has_chat_template=message.has_chat_template,
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=sampling,
        engine_ids=tuple(message.engine_ids),
    )


def server_info(message: pb.GetServerInfoResponse) -> results.ServerInfo:
    """What a server is."""
    return results.ServerInfo(
        version=message.version,
        library_versions=dict(message.library_versions),
        start_time=message.start_time.ToDatetime(tzinfo=UTC),
        max_message_bytes=message.max_message_bytes,
        max_prompt_bytes=message.max_prompt_bytes,
        max_queue=message.max_queue,
    )


def _first_token(message: pb.FirstTokenTiming) -> results.FirstToken:
    return results.FirstToken(
        tokenize_s=_seconds(message.tokenize_duration),
        queue_s=_seconds(message.queue_duration),
        prefill_s=_seconds(message.prefill_duration),
        time_to_first_token_s=_seconds(message.time_to_first_token),
    )


def _usage(message: pb.Usage) -> results.Usage:
    return results.Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        total_tokens=message.total_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
    )


def _timing(message: pb.Timing) -> results.Timing:
    spans = {field.name: _seconds(value) for field, value in message.ListFields() if isinstance(value, Duration)}
    return results.Timing(
        arrival_time=message.arrival_time.ToDatetime(tzinfo=UTC),
        tokenize_s=spans.get("tokenize_duration"),
        queue_s=spans.get("queue_duration"),
        prefill_s=spans.get("prefill_duration"),
        time_to_first_token_s=spans.get("time_to_first_token"),
        time_to_first_text_s=spans.get("time_to_first_text"),
        decode_s=spans.get("decode_duration"),
        total_s=spans.get("total_duration"),
        mean_inter_token_s=spans.get("mean_inter_token"),
        max_inter_token_s=spans.get("max_inter_token"),
        tokens_per_second=message.tokens_per_second,
    )


def _logprobs(messages: Iterable[pb.TokenLogprob]) -> tuple[results.TokenLogprob, ...]:
    return tuple(
        results.TokenLogprob(
            token_id=message.token_id,
            token=message.token,
            logprob=_decimal(message.logprob),
            top=tuple(
                results.TopLogprob(token_id=top.token_id, token=top.token, logprob=_decimal(top.logprob))
                for top in message.top
            ),
        )
        for message in messages
    )


def _decimal(float32: float) -> float:
    """A field of type float as it was meant, 0.7 and not 0.699999988079071: the fewest digits that mean the same."""
    shorter = (float(f"{float32:.{num_digits}g}") for num_digits in range(6, 9))  # 9 always mean the same
    return next((number for number in shorter if struct.unpack("f", struct.pack("f", number))[0] == float32), float32)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _word(enum: EnumTypeWrapper, number: int) -> str:
    """The lower-case end of an enum's name; the number itself where this version does not know it."""
    by_number = enum.DESCRIPTOR.values_by_number
    if number not in by_number:
        return str(number)
    prefix = by_number[0].name.removesuffix("UNSPECIFIED")
    return by_number[number].name.removeprefix(prefix).lower()
