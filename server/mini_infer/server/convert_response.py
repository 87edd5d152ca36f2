"""From our own words to protobuf responses: events, timing, models and engines. Pure; knows no gRPC.

Spans are whole nanoseconds on both sides, so their sums stay exact on the wire.
"""

from __future__ import annotations

from google.protobuf.message import Message

from mini_infer.engines import api
from mini_infer.engines.errors import StreamFailed
from mini_infer.server.call import ServedBy, Timing
from mini_infer.server.errors import MAX_MESSAGE_BYTES, one_line
from mini_infer.server.pool import EngineSnapshot, ModelSnapshot
from mini_infer.server.server_info import ServerInfo
from mini_infer.v1 import admin_pb2
from mini_infer.v1 import generation_pb2 as pb


def started(event: api.Started, served_by: ServedBy, timing: Timing, prompt_tokens: int) -> pb.GenerateStreamResponse:
    """The first message of a stream."""
    message = pb.GenerationStarted(engine=engine_ref(served_by), prompt_tokens=prompt_tokens)
    _set_spans(message, queue_duration=timing.queue_ns)
    return pb.GenerateStreamResponse(request_id=event.key, started=message)


def delta(
    event: api.Delta, output: api.OutputOptions, timing: Timing, previous_tokens: int
) -> pb.GenerateStreamResponse:
    """New text. ``previous_tokens`` counts those of the deltas before. Raises `StreamFailed` for broken text."""
    message = pb.GenerationDelta(
        token_ids=event.token_ids if output.token_ids else (),
        num_tokens=event.cumulative_tokens - previous_tokens,
        cumulative_tokens=event.cumulative_tokens,
        logprobs=[_token_logprob(each) for each in event.logprobs] if output.logprobs else (),
    )
    try:
        message.text = event.text
    except ValueError as error:  # a lone surrogate
        raise StreamFailed("the generated text is not valid Unicode") from error
    _set_spans(message, offset=event.at_ns - timing.arrival_ns)
    if event.first_token_ns is not None:
        message.first_token.CopyFrom(_first_token(timing))
    return pb.GenerateStreamResponse(request_id=event.key, delta=message)


def finished(
    event: api.Finished, served_by: ServedBy | None, timing: Timing, arrival_wall_ns: int
) -> pb.GenerateStreamResponse:
    """The last message of a stream. ``arrival_wall_ns`` counts from the epoch; one that never ran has no engine."""
    usage = event.usage
    message = pb.GenerationFinished(
        reason=f"FINISH_REASON_{event.reason.name}",
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
        ),
        timing=_timing(timing, arrival_wall_ns),
        engine=engine_ref(served_by) if served_by else None,
        seed=event.seed,
    )
    if isinstance(event.matched, str):
        message.matched_string = event.matched
    elif event.matched is not None:
        message.matched_token_id = event.matched
    return pb.GenerateStreamResponse(request_id=event.key, finished=message)


def whole(responses: list[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """The messages of one whole stream as one answer."""
    deltas = [each.delta for each in responses if each.HasField("delta")]
    return pb.GenerateResponse(
        request_id=responses[-1].request_id,
        text="".join(each.text for each in deltas),
        token_ids=[token_id for each in deltas for token_id in each.token_ids],
        logprobs=[logprob for each in deltas for logprob in each.logprobs],
        finished=responses[-1].finished,
    )


def engine_ref(served_by: ServedBy) -> pb.EngineRef:
    """Which engine, and why."""
    return pb.EngineRef(
        engine_id=served_by.engine_id,
        kind=engine_kind(served_by.kind),
        devices=served_by.devices,
        placement_reason=f"PLACEMENT_REASON_{served_by.reason.name}",
    )


def engine_kind(kind: api.EngineKind) -> str:
    """The kind's name on the wire; protobuf takes names for numbers."""
    return f"ENGINE_KIND_{kind.name}"


def model(snapshot: ModelSnapshot) -> pb.Model:
    """A served model; little is known of one that is still being loaded."""
    info = snapshot.info
    if info is None:
        return pb.Model(name=snapshot.name, engine_ids=snapshot.engine_ids)
    return pb.Model(
        name=snapshot.name,
        source=info.source,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        dtype=info.dtype,
        has_chat_template=info.has_chat_template,
        eos_token_ids=info.eos_token_ids,
        default_sampling=sampling(info.default_sampling),
        engine_ids=snapshot.engine_ids,
    )


def engine_status(snapshot: EngineSnapshot, now_ns: int) -> admin_pb2.EngineStatus:
    """An engine as it is at ``now_ns``, monotonic."""
    stats = snapshot.stats
    message = admin_pb2.EngineStatus(
        engine_id=snapshot.engine_id,
        kind=engine_kind(snapshot.kind),
        devices=snapshot.devices,
        model=snapshot.model,
        state=f"ENGINE_STATE_{snapshot.state.name}",
        failure=one_line(snapshot.failure, MAX_MESSAGE_BYTES),
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        max_running=snapshot.max_running,
        generated_tokens=stats.generated_tokens,
    )
    if stats.generated_tokens and stats.last_step_ns is not None:
        _set_spans(message, since_last_token=max(0, now_ns - stats.last_step_ns))
    return message


def server_info(info: ServerInfo, max_queue: int) -> pb.GetServerInfoResponse:
    """What this process is."""
    message = pb.GetServerInfoResponse(
        version=info.version,
        library_versions=info.library_versions,
        max_message_bytes=info.max_message_bytes,
        max_prompt_bytes=info.max_prompt_bytes,
        max_queue=max_queue,
    )
    message.start_time.FromNanoseconds(info.start_wall_ns)
    return message


def sampling(values: api.Sampling) -> pb.SamplingParams:
    """Sampling defaults; what is not said stays absent."""
    return pb.SamplingParams(
        temperature=values.temperature,
        top_p=values.top_p,
        top_k=values.top_k,
        min_p=values.min_p,
        repetition_penalty=values.repetition_penalty,
        presence_penalty=values.presence_penalty,
        frequency_penalty=values.frequency_penalty,
        seed=values.seed,
        logit_bias=values.logit_bias,
    )


def _token_logprob(value: api.TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=each.token_id, token=each.token, logprob=each.logprob) for each in value.top]
    return pb.TokenLogprob(token_id=value.token_id, token=value.token, logprob=value.logprob, top=top)


def _first_token(timing: Timing) -> pb.FirstTokenTiming:
    message = pb.FirstTokenTiming()
    _set_spans(
        message,
        tokenize_duration=timing.tokenize_ns,
        queue_duration=timing.queue_ns,
        prefill_duration=timing.prefill_ns,
        time_to_first_token=timing.time_to_first_token_ns,
    )
    return message


def _timing(timing: Timing, arrival_wall_ns: int) -> pb.Timing:
    message = pb.Timing(tokens_per_second=timing.tokens_per_second)
    message.arrival_time.FromNanoseconds(arrival_wall_ns)
    _set_spans(
        message,
        tokenize_duration=timing.tokenize_ns,
        queue_duration=timing.queue_ns,
        prefill_duration=timing.prefill_ns,
        time_to_first_token=timing.time_to_first_token_ns,
        time_to_first_text=timing.time_to_first_text_ns,
        decode_duration=timing.decode_ns,
        total_duration=timing.total_ns,
        mean_inter_token=timing.mean_inter_token_ns,
        max_inter_token=timing.max_inter_token_ns,
    )
    return message


def _set_spans(message: Message, **spans_ns: int | None) -> None:
    for name, span_ns in spans_ns.items():
        if span_ns is not None:
            getattr(message, name).FromNanoseconds(span_ns)
