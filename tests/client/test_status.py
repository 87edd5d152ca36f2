"""Every row of the server's table, over a real channel, becomes the exception of its name."""

import grpc
import pytest
from grpc import aio
from support.unruly_server import accept, answer, refuse, unruly_server

from mini_infer import client as ours
from mini_infer.client import Client
from mini_infer.client.status import BY_REASON

Code = grpc.StatusCode
TABLE = [
    (Code.INVALID_ARGUMENT, "INVALID_FIELD", ours.InvalidArgument),
    (Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", ours.InvalidArgument),
    (Code.NOT_FOUND, "MODEL_NOT_FOUND", ours.ModelNotFound),
    (Code.NOT_FOUND, "ENGINE_NOT_FOUND", ours.EngineNotFound),
    (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", ours.QueueFull),
    (Code.RESOURCE_EXHAUSTED, "QUOTA", ours.QuotaExceeded),
    (Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", ours.QueueTimeout),
    (Code.RESOURCE_EXHAUSTED, "SLOW_READER", ours.SlowReader),
    (Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", ours.OutOfMemory),
    (Code.RESOURCE_EXHAUSTED, "A_NEW_ONE", ours.Overloaded),
    (Code.UNAVAILABLE, "DRAINING", ours.Draining),
    (Code.UNAVAILABLE, "NO_READY_ENGINE", ours.NoReadyEngine),
    (Code.UNAVAILABLE, "ENGINE_FAILED", ours.EngineFailed),
    (Code.UNAVAILABLE, "A_NEW_ONE", ours.Unavailable),
    (Code.INTERNAL, "STREAM_FAILED", ours.StreamFailed),
    (Code.INTERNAL, "INTERNAL", ours.MiniInferError),
    (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", ours.DeadlineExceeded),
    (Code.DEADLINE_EXCEEDED, "DEADLINE_TOO_SHORT", ours.DeadlineExceeded),
    (Code.UNAUTHENTICATED, "NO_TOKEN", ours.Unauthenticated),
    (Code.PERMISSION_DENIED, "NOT_ALLOWED", ours.PermissionDenied),
    (Code.UNIMPLEMENTED, "LATER", ours.Unimplemented),
    (Code.CANCELLED, "WHATEVER", ours.MiniInferError),
]
TRAILERS = (
    ("mini-infer-request-id", "r-7"),
    ("mini-infer-engine-id", "tiny/1"),
    ("mini-infer-ttft-ms", "12.5"),
    ("mini-infer-generated-tokens", "9"),
)


def refusing(*arguments, **options):
    async def script(server, request, context):
        await refuse(context, *arguments, **options)
        yield

    return unruly_server(script)


async def failure(server) -> ours.MiniInferError:
    async with Client(server.address, max_attempts=1) as client:
        with pytest.raises(ours.MiniInferError) as caught:
            await client.generate(prompt="Hi")
    return caught.value


@pytest.mark.parametrize(("code", "reason", "kind"), TABLE)
async def test_each_reason_has_its_exception(code, reason, kind):
    async with refusing(code, reason, "in words", trailers=TRAILERS) as server:
        error = await failure(server)
    assert type(error) is kind
    assert (error.reason, error.code, error.message, str(error)) == (reason, code, "in words", "in words")
    assert (error.request_id, error.engine_id, error.generated_tokens) == ("r-7", "tiny/1", 9)
    assert error.time_to_first_token_s == pytest.approx(0.0125)


def test_the_table_above_is_whole():
    assert {reason for _, reason, _ in TABLE} >= set(BY_REASON)


async def test_a_field_violation_is_told():
    async with refusing(Code.INVALID_ARGUMENT, "INVALID_FIELD", violation=("stop.strings", "at most 16")) as server:
        error = await failure(server)
    assert error.field_violations == (ours.FieldViolation("stop.strings", "at most 16"),)
    assert str(error) == "stop.strings: at most 16"


async def test_retry_info_goes_before_pushback():
    trailers = (("grpc-retry-pushback-ms", "900"),)
    async with refusing(Code.UNAVAILABLE, "DRAINING", retry_after_s=2.5, trailers=trailers) as server:
        assert (await failure(server)).retry_after_s == 2.5
    async with refusing(Code.UNAVAILABLE, "DRAINING", trailers=trailers) as server:
        assert (await failure(server)).retry_after_s == 0.9


async def test_trailers_that_make_no_sense_do_no_harm():
    trailers = (("mini-infer-ttft-ms", "soon"), ("mini-infer-generated-tokens", "4.5"))
    async with refusing(Code.UNAVAILABLE, "DRAINING", trailers=trailers) as server:
        error = await failure(server)
    assert (error.time_to_first_token_s, error.generated_tokens) == (None, None)


async def test_a_pushback_that_makes_no_sense_means_no_retry():  # gRFC A6
    async with refusing(Code.UNAVAILABLE, "DRAINING", trailers=(("grpc-retry-pushback-ms", "x"),)) as server:
        assert (await failure(server)).retry_after_s < 0


async def test_damaged_details_leave_the_status():
    async def script(server, request, context):
        await context.abort(Code.INTERNAL, "no", (("grpc-status-details-bin", b"\xff\xff\xff"),))
        yield

    async with unruly_server(script) as server:
        error = await failure(server)
    assert (type(error), error.reason, error.code) == (ours.MiniInferError, "", Code.INTERNAL)


async def test_a_request_over_the_limit_is_not_taken_for_a_full_queue():
    async with unruly_server(lambda *_: answer("x")) as server, Client(server.address) as client:
        with pytest.raises(ours.MessageTooLarge) as caught:
            await client.generate(prompt="x" * (5 << 20))  # more than this server takes
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        with pytest.raises(ours.MessageTooLarge):
            await client.generate(prompt="x" * (17 << 20))  # more than we send
        assert (await client.generate(prompt="x")).text == "x"
        assert server.attempt == 1


async def test_grpcs_own_limit_of_calls_is_not_a_message_that_is_too_large():
    async def script(server, request, context):
        await context.abort(Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        yield

    async with unruly_server(script) as server:
        assert type(await failure(server)) is ours.Overloaded


async def test_another_service_is_told_apart():
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            with pytest.raises(ours.Unimplemented):
                await client.generate(prompt="Hi")
    finally:
        await server.stop(0)


async def test_garbage_in_place_of_a_message():
    async def garbage(request, context):
        await accept(context)
        yield b"\xff\xff\xff"

    async def lump(request, context):
        return b"\xff\xff\xff"

    server = aio.server()
    handlers = {
        "GenerateStream": grpc.unary_stream_rpc_method_handler(garbage),
        "Generate": grpc.unary_unary_rpc_method_handler(lump),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("mini_infer.v1.GenerationService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(f"127.0.0.1:{port}") as client:
            with pytest.raises(ours.ProtocolViolation):
                async for _ in client.stream(prompt="Hi"):
                    pass
            with pytest.raises(ours.ProtocolViolation):
                await client.generate(prompt="Hi")
    finally:
        await server.stop(0)


async def test_an_answer_without_its_end_is_truncated():
    async def script(server, request, context):
        return
        yield

    async with unruly_server(script) as server:
        assert type(await failure(server)) is ours.Truncated
