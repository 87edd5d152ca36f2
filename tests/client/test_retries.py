"""What is tried again, how often and when: counted at the server."""

import asyncio

import grpc
import pytest
from support.unruly_server import (
    accept,
    answer,
    delta,
    endless_server,
    finished,
    refuse,
    started,
    unruly_server,
)

from mini_infer.client import (
    Client,
    EngineFailed,
    InvalidArgument,
    MiniInferError,
    QueueFull,
    QueueTimeout,
    ServerUnreachable,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_refusal_is_repeated_when_the_server_says():
    async def script(server, request, context):
        if server.attempt < 3:
            await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.01)
        await accept(context)
        async for event in answer("x"):
            yield event

    async with unruly_server(script) as server, Client(server.address) as client:
        assert [piece.text async for piece in client.stream(prompt="Hi")] == ["x"]
        assert server.attempt == 3


@pytest.mark.parametrize(
    ("code", "reason", "options", "attempts"),
    [
        (RESOURCE_EXHAUSTED, "QUEUE_FULL", {"retry_after_s": 0.01}, 3),
        (RESOURCE_EXHAUSTED, "QUEUE_FULL", {"trailers": (("grpc-retry-pushback-ms", "10"),)}, 3),
        (RESOURCE_EXHAUSTED, "QUEUE_FULL", {}, 1),
        (RESOURCE_EXHAUSTED, "QUEUE_FULL", {"trailers": (("grpc-retry-pushback-ms", "-1"),)}, 1),
        (RESOURCE_EXHAUSTED, "QUEUE_FULL", {"retry_after_s": 3600.0}, 1),
        (RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", {"retry_after_s": 0.01}, 3),
        (RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", {"retry_after_s": 0.01}, 1),
        (RESOURCE_EXHAUSTED, "SLOW_READER", {"retry_after_s": 0.01}, 1),
        (UNAVAILABLE, "DRAINING", {"retry_after_s": 0.01}, 3),
        (UNAVAILABLE, "NO_READY_ENGINE", {}, 3),
        (UNAVAILABLE, "ENGINE_FAILED", {"retry_after_s": 0.01}, 3),
        (UNAVAILABLE, "ENGINE_FAILED", {"trailers": (("mini-infer-generated-tokens", "4"),)}, 1),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", {"retry_after_s": 0.01}, 1),
        (grpc.StatusCode.INTERNAL, "STREAM_FAILED", {"retry_after_s": 0.01}, 1),
    ],
)
@pytest.mark.parametrize("header", [True, False])
async def test_how_often_each_failure_is_tried(code, reason, options, attempts, header):
    async def script(server, request, context):
        trailers = options.get("trailers", ())
        if header:  # the id in trailers too, as servers send it: grpc.aio drops a header that a status overtakes
            await accept(context, f"r-{server.attempt}")
            trailers = (*trailers, ("mini-infer-request-id", f"r-{server.attempt}"))
        await refuse(context, code, reason, **{**options, "trailers": trailers})
        yield

    async with unruly_server(script) as server, Client(server.address) as client:
        with pytest.raises(MiniInferError) as caught:
            async for _ in client.stream(prompt="Hi"):
                pass
        assert caught.value.reason == reason
        assert server.attempt == attempts
        assert caught.value.request_id == (f"r-{attempts}" if header else "")


async def test_nothing_is_repeated_once_text_was_delivered():
    async def script(server, request, context):
        await accept(context)
        yield started()
        yield delta("a")
        await refuse(context, UNAVAILABLE, "ENGINE_FAILED", retry_after_s=0.01)

    async with unruly_server(script) as server, Client(server.address) as client:
        with pytest.raises(EngineFailed) as caught:
            async for _ in client.stream(prompt="Hi"):
                pass
        assert (caught.value.text, caught.value.generated_tokens, server.attempt) == ("a", 1, 1)


async def test_a_repeated_stream_shows_the_newest_attempt():
    async def script(server, request, context):
        await accept(context, f"r-{server.attempt}")
        yield started(f"r-{server.attempt}")
        if server.attempt == 1:
            await refuse(context, UNAVAILABLE, "ENGINE_FAILED", retry_after_s=0.01)
        yield delta("a")
        yield finished()

    async with (
        unruly_server(script) as server,
        Client(server.address) as client,
        client.stream(prompt="Hi") as stream,
    ):
        assert stream.request_id == "r-1"
        assert [piece.text async for piece in stream] == ["a"]
        assert server.attempt == 2


async def test_max_attempts_of_one_never_repeats():
    async def script(server, request, context):
        await refuse(context, UNAVAILABLE, "DRAINING", retry_after_s=0.01)
        yield

    async with unruly_server(script) as server, Client(server.address, max_attempts=1) as client:
        with pytest.raises(MiniInferError):
            await client.generate(prompt="Hi")
        assert server.attempt == 1


@pytest.mark.parametrize(("reason", "attempts"), [("QUEUE_TIMEOUT", 1), ("QUEUE_FULL", 1), ("QUOTA", 3)])
async def test_who_may_not_queue_is_not_tried_again_for_the_queue(reason, attempts):
    async def script(server, request, context):
        await refuse(context, RESOURCE_EXHAUSTED, reason, retry_after_s=0.01)
        yield

    async with unruly_server(script) as server, Client(server.address) as client:
        with pytest.raises(MiniInferError) as caught:
            await client.generate(prompt="Hi", max_queue_duration_s=0)
        assert (server.attempt, caught.value.num_attempts) == (attempts, attempts)
        with pytest.raises(MiniInferError):
            async for _ in client.stream(prompt="Hi", max_queue_duration_s=0):
                pass
        assert server.attempt == 2 * attempts


async def test_a_stream_tells_of_its_attempts():
    async def script(server, request, context):
        if server.attempt < 3:
            await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_FULL", f"refusal {server.attempt}", retry_after_s=0.05)
        async for event in answer("x"):
            yield event

    told = []
    async with unruly_server(script) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi", on_retry=lambda error, wait_s: told.append((str(error), wait_s >= 0.05)))
        assert (stream.num_attempts, stream.retries_s) == (0, 0.0)
        assert [piece.text async for piece in stream] == ["x"]
        assert told == [("refusal 1", True), ("refusal 2", True)]
        assert stream.num_attempts == 3
        assert stream.retries_s > 0.1


async def test_a_wait_beyond_the_timeout_fails_at_once_with_the_reason():
    async def script(server, request, context):
        await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=20.0)
        yield

    async with unruly_server(script) as server, Client(server.address) as client:
        with pytest.raises(QueueFull) as caught:
            await asyncio.wait_for(client.generate(prompt="Hi", timeout_s=10), 5)
        assert (caught.value.retry_after_s, server.attempt) == (20.0, 1)


async def test_cancel_interrupts_the_wait_between_attempts():
    async def script(server, request, context):
        server.reached.set()
        await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", retry_after_s=20.0)
        yield

    async with unruly_server(script) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")

        async def read():
            return [piece async for piece in stream]

        reader = asyncio.create_task(read())
        await asyncio.wait_for(server.reached.wait(), 10)
        await asyncio.sleep(0.05)  # the refusal travels; cancelling while it does is right too
        await stream.cancel()
        assert await asyncio.wait_for(reader, 5) == []


async def test_the_unary_call_is_repeated_too():
    async def script(server, request, context):
        if server.attempt == 1:
            await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", retry_after_s=0.01)
        async for event in answer("x"):
            yield event

    async with unruly_server(script) as server, Client(server.address) as client:
        assert (await client.generate(prompt="Hi")).text == "x"
        assert server.attempt == 2


async def test_no_server_is_an_error_soon():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ServerUnreachable):
            await asyncio.wait_for(client.generate(prompt="Hi"), 10)
        with pytest.raises(ServerUnreachable):
            async with client.stream(prompt="Hi"):
                pass


async def test_a_server_that_dies_under_a_stream_is_told_with_the_text():
    async with endless_server() as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        pieces = aiter(stream)
        assert (await anext(pieces)).text == "a"
        await server.stop()
        with pytest.raises(ServerUnreachable) as caught:
            await anext(pieces)
        assert caught.value.text == "a"


async def test_a_refusal_raises_on_entering_too():
    async def script(server, request, context):
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", violation=("prompt", "is too bad"))
        yield

    async with unruly_server(script) as server, Client(server.address) as client:
        with pytest.raises(InvalidArgument, match="prompt: is too bad"):
            async with client.stream(prompt="Hi"):
                pass


async def test_queue_timeouts_are_told_apart_by_reason_not_by_status():
    async def script(server, request, context):
        await accept(context)
        await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        yield

    async with unruly_server(script) as server, Client(server.address) as client:
        with pytest.raises(QueueTimeout):
            async for _ in client.stream(prompt="Hi"):
                pass
