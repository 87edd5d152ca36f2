"""CancelGeneration, draining and closing, against streams in every phase and against completion itself."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.dispatching import (
    GatedText,
    ManualEngine,
    assert_idle,
    ending,
    idle,
    make_call,
    make_pool,
    placed,
    read,
    rest,
    serving,
    until,
)

from mini_infer.engines.api import Finished, FinishReason
from mini_infer.engines.errors import Draining
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.server.dispatcher import Dispatcher

ME = "ipv4:127.0.0.1"


async def test_a_queued_stream_is_cancelled_with_its_times() -> None:
    async with serving(make_pool(ManualEngine())) as dispatcher:
        await placed(dispatcher.enter(make_call()))
        stream = dispatcher.enter(make_call("one two"))
        await stream.prepare()
        assert dispatcher.cancel([stream.key], ME) == ([stream.key], [])
        assert dispatcher.models[0].num_waiting == 0
        (finished,) = await rest(stream)
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.usage.prompt_tokens) == (FinishReason.CANCELLED, 2)
        assert stream.timing.tokenize_ns is not None
        assert stream.timing.total_ns is not None
        assert stream.timing.queue_ns is None


async def test_a_stream_being_tokenized_is_cancelled() -> None:
    text = GatedText()
    async with serving(make_pool(ManualEngine(text=text))) as dispatcher:
        stream = dispatcher.enter(make_call())
        end = asyncio.create_task(ending(stream))
        await asyncio.sleep(0)
        assert dispatcher.cancel([stream.key], ME) == ([stream.key], [])
        assert await end is FinishReason.CANCELLED
        text.gate.set()


async def test_a_running_stream_is_cancelled_by_its_engine() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"], repeat=True, gate=(gate := Gate(2))))
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call())
        reader = asyncio.create_task(read(stream))
        await until(lambda: stream.num_tokens == 2)
        assert dispatcher.cancel([stream.key], ME) == ([stream.key], [])
        finished = (await reader)[-1]
        assert isinstance(finished, Finished)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.CANCELLED, 2)
        assert stream.timing.time_to_first_token_ns is not None
        gate.open()


async def test_cancelling_goes_by_id_or_label_within_one_caller() -> None:
    async with serving(make_pool(ManualEngine(max_running=9))) as dispatcher:
        for key, label, caller in [
            ("1", "mine", ME),
            ("2", "mine", ME),
            ("3", "", ME),
            ("4", "mine", "other"),
            ("5", "1", ME),
        ]:
            dispatcher.enter(make_call(key=key, label=label, caller=caller))
        assert dispatcher.cancel(["4", "nothing", ""], ME) == ([], ["4", "nothing", ""])
        assert dispatcher.cancel(["mine"], "nobody") == ([], ["mine"])
        assert dispatcher.cancel(["1", "1", "mine", "nothing", "nothing"], ME) == (["1", "5", "2"], ["nothing"])
        assert dispatcher.cancel(["1", "mine"], ME) == ([], ["1", "mine"])
        assert dispatcher.cancel(["3"], ME) == (["3"], [])
        assert dispatcher.models[0].num_waiting == 1


async def test_cancelling_twice_while_the_engine_takes_its_time_is_the_same_as_once() -> None:
    engine = ManualEngine(obedient=False)
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call())
        await placed(stream)
        assert dispatcher.cancel([stream.key], ME) == dispatcher.cancel([stream.key], ME) == ([stream.key], [])
        engine.finish(stream.key, FinishReason.CANCELLED)
        assert len(await rest(stream)) == 1
        assert dispatcher.cancel([stream.key], ME) == ([], [stream.key])


async def test_cancelling_races_with_completion_two_thousand_times() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"]), max_running=4)
    rng = random.Random(7)
    reasons: dict[object, int] = {}
    async with serving(make_pool(engine)) as dispatcher:

        async def one() -> None:
            stream = dispatcher.enter(make_call())
            end = asyncio.create_task(ending(stream))
            for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 13])):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.002)
            for _ in range(rng.choice([1, 2])):
                cancelled, missed = dispatcher.cancel([stream.key], ME)
                assert sorted(cancelled + missed) == [stream.key]
            reason = await end
            reasons[reason] = reasons.get(reason, 0) + 1

        for _ in range(250):
            await asyncio.gather(*(one() for _ in range(8)))
        await idle(dispatcher)
    assert set(reasons) == {FinishReason.CANCELLED, FinishReason.EOS}
    assert sum(reasons.values()) == 2000


async def test_drain_lets_running_and_queued_streams_finish_and_refuses_late_ones() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=(gate := Gate())), max_running=2)
    async with serving(make_pool(engine)) as dispatcher:
        ends = [asyncio.create_task(ending(dispatcher.enter(make_call()))) for _ in range(6)]
        await until(lambda: dispatcher.engines[0].num_running == 2)
        drain = asyncio.create_task(dispatcher.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(Draining) as caught:
            dispatcher.enter(make_call())
        assert caught.value.retry_after_s > 0
        assert not drain.done()
        gate.open()
        assert await asyncio.gather(*ends) == [FinishReason.EOS] * 6
        await drain
        with pytest.raises(Draining):
            dispatcher.enter(make_call())


@pytest.mark.parametrize("grace_s", [0.0, 0.05])
async def test_drain_fails_what_is_left_after_its_grace(grace_s: float) -> None:
    text = GatedText()
    text.gate.set()
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate()), text=text)
    async with serving(make_pool(engine)) as dispatcher:
        running, waiting, tokenizing, entered = (dispatcher.enter(make_call()) for _ in range(4))
        await placed(running)
        await waiting.prepare()
        text.gate.clear()
        ends = [asyncio.create_task(end) for end in (rest(running), rest(waiting), read(tokenizing))]
        await asyncio.sleep(0)
        await dispatcher.drain(grace_s)
        errors = await asyncio.gather(*ends, return_exceptions=True)
        assert [type(error) for error in errors] == [Draining] * 3
        assert await ending(entered) is Draining
        await idle(dispatcher)
        text.gate.set()


async def test_drain_of_an_idle_server_ends_at_once() -> None:
    async with serving(make_pool(ManualEngine())) as dispatcher:
        async with asyncio.timeout(5):
            await dispatcher.drain(600.0)


async def test_close_fails_everything_at_once_and_twice_is_once() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate()))
    async with serving(make_pool(engine)) as dispatcher:
        streams = [dispatcher.enter(make_call()) for _ in range(3)]
        ends = [asyncio.create_task(ending(stream)) for stream in streams]
        await until(lambda: dispatcher.engines[0].num_running == 1)
        await asyncio.gather(dispatcher.close(), dispatcher.close())
        assert await asyncio.gather(*ends) == [Draining] * 3
        assert_idle(dispatcher)
        with pytest.raises(Draining):
            dispatcher.enter(make_call())


async def test_a_server_that_never_started_can_be_closed() -> None:
    await Dispatcher([make_pool(ScriptedEngine())]).close()
