"""The streaming call over a real channel, against servers that keep the contract and servers that break it."""

import asyncio
import gc

import grpc
import pytest
from support.unruly_server import (
    accept,
    answer,
    delta,
    endless_server,
    finished,
    polite,
    started,
    unruly_server,
)

from mini_infer.client import (
    Client,
    ClientClosed,
    DeadlineExceeded,
    ProtocolViolation,
    Truncated,
)
from mini_infer.v1 import generation_pb2 as pb

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_streams_an_answer_and_keeps_its_result():
    async with unruly_server(polite) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        deltas = [piece async for piece in stream]
        assert [piece.text for piece in deltas] == ["Hello", " world"]
        assert deltas[0].first_token.time_to_first_token_s == pytest.approx(0.007)
        assert stream.started.prompt_tokens == 3
        assert stream.started.engine.engine_id == "tiny/0"
        result = stream.result
        assert result.text == "Hello world"
        assert (result.finish_reason, result.matched, result.seed) == ("eos", 2, None)
        assert (result.usage.completion_tokens, result.engine.kind) == (2, "scripted")
        timing = result.timing
        assert timing.tokenize_s + timing.queue_s + timing.prefill_s == pytest.approx(timing.time_to_first_token_s)
        assert timing.decode_s is None
        assert server.metadata[0]["user-agent"].startswith("mini-infer/")


async def test_entering_a_stream_waits_for_its_header_only():
    async def script(server, request, context):
        await accept(context)
        await server.gate.wait()
        async for event in answer("x"):
            yield event

    async with (
        unruly_server(script) as server,
        Client(server.address) as client,
        client.stream(prompt="Hi") as stream,
    ):
        assert stream.request_id == "r-1"
        assert stream.started is None
        server.gate.set()
        assert (await stream.wait_started()).prompt_tokens == 3
        assert [piece.text async for piece in stream] == ["x"]
        assert stream.result.text == "x"


async def test_a_stream_cancelled_in_the_queue_has_no_start():
    async def script(server, request, context):
        await accept(context)
        yield finished(0, reason=pb.FINISH_REASON_CANCELLED)

    async with (
        unruly_server(script) as server,
        Client(server.address) as client,
        client.stream(prompt="Hi") as stream,
    ):
        assert await stream.wait_started() is None
        assert [piece async for piece in stream] == []
        assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([], Truncated),
        ([started(), delta("a")], Truncated),
        ([delta("a")], ProtocolViolation),
        ([started(), started()], ProtocolViolation),
        ([started(), delta("a"), finished(), delta("b", 2)], ProtocolViolation),
        ([started(), finished(), finished()], ProtocolViolation),
    ],
)
async def test_a_stream_that_breaks_the_contract_raises_though_its_status_is_ok(events, error):
    async def script(server, request, context):
        await accept(context)
        for event in events:
            yield event

    async with unruly_server(script) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        with pytest.raises(error) as caught:
            async for _ in stream:
                pass
        assert (
            caught.value.text == stream.text == "".join(event.delta.text for event in events if started() in events)[:1]
        )
        assert caught.value.request_id == "r-1"
        assert server.attempt == 1


async def test_an_event_of_a_newer_server_is_passed_over():
    async def script(server, request, context):
        yield pb.GenerateStreamResponse(request_id="r-1")
        yield started()
        yield finished(0, reason=99)

    async with unruly_server(script) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        assert [piece async for piece in stream] == []
        assert stream.result.finish_reason == "99"


async def test_leaving_the_loop_early_ends_the_call_at_the_server():
    async with endless_server() as server, Client(server.address) as client:
        async for _ in client.stream(prompt="Hi"):
            break
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_leaving_the_block_early_ends_the_call_at_the_server():
    async with endless_server() as server, Client(server.address) as client:
        async with client.stream(prompt="Hi") as stream:
            assert stream.request_id == "r-1"
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_leaving_the_block_ends_a_reader_in_another_task():
    async with endless_server() as server, Client(server.address) as client:

        async def read(stream):
            return [piece.text async for piece in stream]

        async with client.stream(prompt="Hi") as stream:
            reader = asyncio.create_task(read(stream))
            await asyncio.wait_for(server.reached.wait(), 10)
        assert await asyncio.wait_for(reader, 10) in ([], ["a"])
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_a_failure_in_the_block_is_passed_on():
    async with endless_server() as server, Client(server.address) as client:

        async def fail():
            async with client.stream(prompt="Hi") as stream:
                async for _ in stream:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_a_timeout_of_asyncio_stays_one():
    async with endless_server() as server, Client(server.address) as client:

        async def read():
            async for _ in client.stream(prompt="Hi"):
                pass

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 0.3)
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_no_time_left_is_the_deadline():
    async with unruly_server(polite) as server, Client(server.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate(prompt="Hi", timeout_s=0)


async def test_a_proxy_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with unruly_server(polite) as server, Client(server.address) as client:
        assert (await client.generate(prompt="Hi")).text == "Hello world"


async def test_a_cancelled_reader_ends_the_call_at_the_server():
    async with endless_server() as server, Client(server.address) as client:

        async def read():
            async for _ in client.stream(prompt="Hi"):
                pass

        reader = asyncio.create_task(read())
        await asyncio.wait_for(server.reached.wait(), 10)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_a_dropped_stream_leaves_nothing_behind():
    async with endless_server() as server, Client(server.address) as client:
        pieces = aiter(client.stream(prompt="Hi"))
        await anext(pieces)
        del pieces
        gc.collect()
        await asyncio.wait_for(server.cancelled.wait(), 10)


async def test_cancel_from_another_task_ends_the_loop_without_a_result():
    async with endless_server() as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        has_read = asyncio.Event()

        async def read():
            async for _ in stream:
                has_read.set()

        reader = asyncio.create_task(read())
        await asyncio.wait_for(has_read.wait(), 10)
        await stream.cancel()
        await stream.cancel()
        await reader
        assert stream.text == "a"
        await asyncio.wait_for(server.cancelled.wait(), 10)
        with pytest.raises(RuntimeError, match="result"):
            stream.result  # noqa: B018


async def test_a_stream_cancelled_before_it_began_sends_nothing():
    async with unruly_server(polite) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        await stream.cancel()
        assert [piece async for piece in stream] == []
        assert server.attempt == 0


async def test_a_stream_is_read_only_once():
    async with unruly_server(polite) as server, Client(server.address) as client:
        stream = client.stream(prompt="Hi")
        assert len([piece async for piece in stream]) == 2
        with pytest.raises(RuntimeError, match="once"):
            async for _ in stream:
                pass


async def test_closing_the_client_tells_the_reader_so():
    async with endless_server() as server, Client(server.address) as client:

        async def read():
            async for _ in client.stream(prompt="Hi"):
                pass

        reader = asyncio.create_task(read())
        await asyncio.wait_for(server.reached.wait(), 10)
        await client.close()
        with pytest.raises(ClientClosed):
            await reader


async def test_a_client_that_is_not_open_says_so():
    client = Client("127.0.0.1:1")
    with pytest.raises(ClientClosed, match="async with"):
        await client.generate(prompt="Hi")
    with pytest.raises(ClientClosed, match="async with"):
        async for _ in client.stream(prompt="Hi"):
            pass


async def test_the_deadline_ends_a_stream_with_its_text():
    async with endless_server() as server, Client(server.address) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            async for _ in client.stream(prompt="Hi", timeout_s=2.0):
                pass
        error = caught.value
        assert (error.text, error.generated_tokens, error.engine_id) == ("a", 1, "tiny/0")
        assert error.time_to_first_token_s == pytest.approx(0.007)


async def test_the_same_deltas_are_still_the_same_later():
    async with unruly_server(polite) as server, Client(server.address) as client:
        kept = [piece async for piece in client.stream(prompt="Hi")]
        assert [piece.cumulative_tokens for piece in kept] == [1, 2]
        with pytest.raises(AttributeError):
            kept[0].text = "changed"


async def test_joined_deltas_are_the_unary_text():
    async with unruly_server(polite) as server, Client(server.address) as client:
        joined = "".join([piece.text async for piece in client.stream(prompt="Hi")])
        result = await client.generate(prompt="Hi")
        assert joined == result.text == "Hello world"
        assert server.requests[0] == server.requests[1]
