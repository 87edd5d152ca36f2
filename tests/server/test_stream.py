from __future__ import annotations

import asyncio

import pytest
from support.dispatching import make_call

from mini_infer.engines.api import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    Sampling,
    Started,
    StopConditions,
    StreamTimes,
    Usage,
)
from mini_infer.engines.errors import EngineFailed, QueueTimeout
from mini_infer.server.stream import Stream

TIMES = StreamTimes(admitted_ns=30, first_token_ns=60, first_text_ns=61, last_token_ns=90, max_gap_ns=20, num_tokens=3)


class Desk:
    """A host that does nothing but remember."""

    def __init__(self) -> None:
        self.prepared: list[Stream] = []
        self.ended: list[Stream] = []

    def start_preparing(self, stream: Stream) -> None:
        self.prepared.append(stream)

    def end(self, stream: Stream, final: Finished | Failed) -> None:
        self.ended.append(stream)
        stream.push(final)


def make_stream() -> tuple[Stream, Desk]:
    desk = Desk()
    return Stream(make_call(key="k", arrival_ns=10), desk), desk


def prepared() -> PreparedRequest:
    return PreparedRequest(
        key="k",
        prompt_ids=(1, 2),
        sampling=Sampling(),
        stop=StopConditions(),
        eos_token_ids=frozenset(),
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=make_call().request.output,
    )


def finished() -> Finished:
    return Finished("k", FinishReason.EOS, Usage(2, 3), TIMES)


async def test_events_come_in_order_and_end_after_finished() -> None:
    stream, _ = make_stream()
    events = [
        Started("k", 30),
        Delta("k", "a", (1,), 1, 60, first_token_ns=60),
        Delta("k", "b", (2,), 2, 90),
        finished(),
    ]
    for event in events:
        stream.push(event)
    assert [event async for event in stream] == events
    assert [event async for event in stream] == []


async def test_a_reader_that_waits_is_woken_by_every_event() -> None:
    stream, _ = make_stream()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push(Started("k", 30))
    assert await reader == Started("k", 30)


async def test_failed_is_raised_after_the_deltas_before_it_and_whenever_asked_again() -> None:
    stream, _ = make_stream()
    stream.push(Delta("k", "a", (1,), 1, 60, first_token_ns=60))
    stream.push(Failed("k", EngineFailed("gone"), TIMES))
    assert isinstance(await anext(stream), Delta)
    for _ in range(3):
        with pytest.raises(EngineFailed, match="gone"):
            await anext(stream)


async def test_one_error_given_to_many_streams_does_not_collect_their_frames() -> None:
    error = EngineFailed("gone")
    for _ in range(50):
        stream, _ = make_stream()
        stream.push(Failed("k", error, TIMES))
        with pytest.raises(EngineFailed):
            await anext(stream)
    num_frames, trace = 0, error.__traceback__
    while trace is not None:
        num_frames, trace = num_frames + 1, trace.tb_next
    assert num_frames < 10


async def test_only_the_first_final_event_counts() -> None:
    stream, _ = make_stream()
    stream.push(finished())
    stream.push(Failed("k", EngineFailed("late"), StreamTimes()))
    stream.push(Delta("k", "late", (1,), 9, 99))
    assert [event async for event in stream] == [finished()]
    assert stream.num_tokens == 3
    assert stream.timing.times == TIMES


async def test_timing_grows_with_the_events_and_is_the_engines_at_the_end() -> None:
    stream, _ = make_stream()
    assert (stream.timing.arrival_ns, stream.timing.tokenize_ns, stream.timing.total_ns) == (10, None, None)
    stream.mark_prepared(prepared(), 15)
    assert stream.timing.tokenize_ns == 5
    stream.push(Started("k", 30))
    assert (stream.timing.queue_ns, stream.timing.prefill_ns) == (15, None)
    stream.push(Delta("k", "", (1,), 1, 60, first_token_ns=60))
    assert (stream.timing.prefill_ns, stream.timing.time_to_first_token_ns, stream.timing.time_to_first_text_ns) == (
        30,
        50,
        None,
    )
    stream.push(Delta("k", "a", (2,), 2, 70))
    assert (stream.timing.time_to_first_text_ns, stream.timing.decode_ns, stream.num_tokens) == (60, 10, 2)
    stream.push(finished())
    timing = stream.timing
    assert timing.times == TIMES
    assert timing.tokenize_ns is not None
    assert timing.queue_ns is not None
    assert timing.prefill_ns is not None
    assert timing.tokenize_ns + timing.queue_ns + timing.prefill_ns == timing.time_to_first_token_ns
    assert timing.total_ns is not None


async def test_an_end_without_stamps_does_not_untell_what_was_told() -> None:
    stream, _ = make_stream()
    stream.push(Started("k", 30))
    stream.push(Delta("k", "a", (1,), 1, 60, first_token_ns=60))
    stream.push(Failed("k", EngineFailed("gone"), StreamTimes()))
    assert stream.timing.times == StreamTimes(
        admitted_ns=30, first_token_ns=60, first_text_ns=60, last_token_ns=60, num_tokens=1
    )


async def test_leaving_the_context_early_ends_the_stream_at_its_host_once() -> None:
    stream, desk = make_stream()
    async with stream:
        pass
    stream.close()
    assert desk.ended == [stream]


async def test_leaving_the_context_after_the_end_does_nothing() -> None:
    stream, desk = make_stream()
    async with stream:
        stream.push(finished())
    assert desk.ended == []


async def test_a_cancelled_reader_closes_its_stream_and_stays_cancelled() -> None:
    stream, desk = make_stream()

    async def read() -> None:
        async with stream:
            await anext(stream)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert desk.ended == [stream]


async def test_prepare_raises_what_ended_the_stream_meanwhile() -> None:
    stream, _ = make_stream()
    preparing = asyncio.create_task(stream.prepare())
    await asyncio.sleep(0)
    stream.push(stream.failed(QueueTimeout("too long", 3.0)))
    with pytest.raises(QueueTimeout) as caught:
        await preparing
    assert caught.value.retry_after_s == 3.0


async def test_prepare_returns_when_the_stream_was_cancelled_meanwhile() -> None:
    stream, _ = make_stream()
    preparing = asyncio.create_task(stream.prepare())
    await asyncio.sleep(0)
    stream.push(stream.cancelled())
    await preparing
    assert [event.reason async for event in stream if isinstance(event, Finished)] == [FinishReason.CANCELLED]


async def test_a_timer_is_replaced_by_the_next_and_dropped_at_the_end() -> None:
    stream, _ = make_stream()
    fired: list[str] = []
    stream.set_timer(0, lambda: fired.append("first"))
    stream.set_timer(0, lambda: fired.append("second"))
    await asyncio.sleep(0.01)
    assert fired == ["second"]
    stream.set_timer(0, lambda: fired.append("third"))
    stream.push(finished())
    await asyncio.sleep(0.01)
    assert fired == ["second"]
