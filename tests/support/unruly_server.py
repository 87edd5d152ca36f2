"""A server that does whatever a test writes, right or wrong: what no proper engine could be brought to do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc

from mini_infer.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from mini_infer.v1 import generation_pb2 as pb

Script = Callable[["Unruly", pb.GenerateRequest, aio.ServicerContext], AsyncIterator[pb.GenerateStreamResponse]]
ENGINE = pb.EngineRef(
    engine_id="tiny/0",
    kind=pb.ENGINE_KIND_SCRIPTED,
    devices=["cpu"],
    placement_reason=pb.PLACEMENT_REASON_ONLY_ENGINE,
)


class Unruly(generation_pb2_grpc.GenerationServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Records what comes and lets ``script`` answer; ``gate`` is for scripts that wait for the test."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.engines: list[admin_pb2.EngineStatus] = []
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.address = ""
        self.stop: Callable[[], Awaitable[None]]
        self.health = health.aio.HealthServicer()

    @property
    def attempt(self) -> int:
        """1 in the first call."""
        return len(self.requests)

    async def GenerateStream(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self.script(self, request, context):
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # in the script, or in between while gRPC was sending
            self.cancelled.set()
            raise

    async def Generate(self, request, context):  # noqa: N802
        response = pb.GenerateResponse(request_id="r-1")
        async for event in self.GenerateStream(request, context):
            response.text += event.delta.text
            if event.HasField("finished"):
                response.finished.CopyFrom(event.finished)
        return response

    async def ListEngines(self, request, context):  # noqa: N802
        return admin_pb2.ListEnginesResponse(engines=self.engines)


@asynccontextmanager
async def unruly_server(script: Script) -> AsyncIterator[Unruly]:
    servicer = Unruly(script)
    server = aio.server()
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
    await server.start()
    servicer.stop = partial(server.stop, None)
    try:
        yield servicer
    finally:
        await server.stop(0)


async def accept(context: aio.ServicerContext, request_id: str = "r-1") -> None:
    """Sends the header."""
    await context.send_initial_metadata((("mini-infer-request-id", request_id),))


def started(request_id: str = "r-1") -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        request_id=request_id, started=pb.GenerationStarted(engine=ENGINE, queue_duration=ms(2), prompt_tokens=3)
    )


def delta(text: str, cumulative: int = 1, **fields) -> pb.GenerateStreamResponse:
    if cumulative == 1:
        fields["first_token"] = pb.FirstTokenTiming(
            tokenize_duration=ms(1), queue_duration=ms(2), prefill_duration=ms(4), time_to_first_token=ms(7)
        )
    message = pb.GenerationDelta(text=text, num_tokens=1, cumulative_tokens=cumulative, offset=ms(7), **fields)
    return pb.GenerateStreamResponse(request_id="r-1", delta=message)


def finished(num_tokens: int = 1, **fields) -> pb.GenerateStreamResponse:
    timing = pb.Timing(
        tokenize_duration=ms(1),
        queue_duration=ms(2),
        prefill_duration=ms(4),
        time_to_first_token=ms(7),
        total_duration=ms(9),
        tokens_per_second=25.0,
    )
    message = pb.GenerationFinished(
        **{"reason": pb.FINISH_REASON_EOS, "matched_token_id": 2, **fields},
        usage=pb.Usage(prompt_tokens=3, completion_tokens=num_tokens, total_tokens=3 + num_tokens),
        timing=timing,
        engine=ENGINE,
    )
    return pb.GenerateStreamResponse(request_id="r-1", finished=message)


async def answer(*texts: str) -> AsyncIterator[pb.GenerateStreamResponse]:
    """A proper stream, but for its header."""
    yield started()
    for number, text in enumerate(texts, start=1):
        yield delta(text, number)
    yield finished(len(texts))


async def polite(server: Unruly, request: pb.GenerateRequest, context: aio.ServicerContext):
    """The script of a server that does nothing wrong: says Hello world."""
    await accept(context)
    async for event in answer("Hello", " world"):
        yield event


def endless_server() -> AbstractAsyncContextManager[Unruly]:
    """A server that says "a" and then nothing more."""

    async def script(server, request, context):
        await accept(context)
        yield started()
        yield delta("a")
        server.reached.set()
        await server.gate.wait()

    return unruly_server(script)


def refuse(
    context: aio.ServicerContext,
    code: grpc.StatusCode,
    reason: str,
    message: str = "no",
    *,
    retry_after_s: float | None = None,
    violation: tuple[str, str] | None = None,
    trailers: tuple[tuple[str, str], ...] = (),
) -> Awaitable[None]:
    """Ends a call as the server's table says."""
    details = [ErrorInfo(reason=reason, domain="mini-infer")]
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(RetryInfo(retry_delay=delay))
    if violation is not None:
        field, description = violation
        details.append(BadRequest(field_violations=[BadRequest.FieldViolation(field=field, description=description)]))
    status = Status(code=code.value[0], message=message)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()), *trailers))


def ms(milliseconds: int) -> Duration:
    return Duration(nanos=milliseconds * 1_000_000)
