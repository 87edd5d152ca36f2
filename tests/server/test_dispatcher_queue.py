"""Waiting: order, bounds, limits of time, and who is refused before anything happens."""

from __future__ import annotations

import asyncio
import time

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

from mini_infer.engines.api import Finished, FinishReason, Request
from mini_infer.engines.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MiniInferError,
    NotFound,
    Overloaded,
    QueueFull,
    QueueTimeout,
    StreamFailed,
)
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.engines.scripted_text import ScriptedText
from mini_infer.server.pace import Pace


async def test_three_waves_of_twelve_on_four_slots_never_run_five() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a", "b", "c"], step_s=0.002), max_running=4)
    async with serving(make_pool(engine)) as dispatcher:
        for _ in range(3):
            streams = [dispatcher.enter(make_call()) for _ in range(12)]
            assert await asyncio.gather(*map(ending, streams)) == [FinishReason.EOS] * 12
            assert engine.peak_running == 4
            await idle(dispatcher)
            assert_idle(dispatcher)


async def test_an_engine_gets_a_stream_only_when_it_has_a_free_slot() -> None:
    engine = ManualEngine(max_running=2)
    async with serving(make_pool(engine)) as dispatcher:
        for number in range(6):
            await dispatcher.enter(make_call(key=str(number))).prepare()
        assert engine.submitted == ["0", "1"]
        engine.finish("1")
        await until(lambda: len(engine.submitted) == 3)
        assert engine.submitted == ["0", "1", "2"]
        assert engine.peak_running == 2


async def test_a_slot_is_free_only_after_the_engines_own_final_event() -> None:
    engine = ManualEngine(obedient=False)
    async with serving(make_pool(engine)) as dispatcher:
        gone, waiting = (dispatcher.enter(make_call()) for _ in range(2))
        async with gone:
            await placed(gone)
        await waiting.prepare()
        assert engine.cancelled == [gone.key]
        assert (dispatcher.engines[0].num_running, waiting.served_by) == (1, None)
        engine.finish(gone.key, FinishReason.CANCELLED)
        await until(lambda: waiting.served_by is not None)


async def test_first_come_first_served_even_when_a_later_prompt_is_tokenized_sooner() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        holder, first, second = (dispatcher.enter(make_call()) for _ in range(3))
        await placed(holder)
        await second.prepare()
        await first.prepare()
        engine.finish(holder.key)
        await until(lambda: len(engine.submitted) == 2)
        assert engine.submitted == [holder.key, first.key]


async def test_a_flood_of_two_thousand_is_refused_before_tokenizing() -> None:
    text = GatedText()
    engine = ManualEngine(text=text)
    async with serving(make_pool(engine, max_queue=100)) as dispatcher:
        accepted, refused = [], []
        for _ in range(2000):
            try:
                accepted.append(dispatcher.enter(make_call()))
            except QueueFull as error:
                refused.append(error.retry_after_s)
        assert (len(accepted), len(refused)) == (100, 1900)
        assert all(0.1 <= seconds <= 60 for seconds in refused)
        assert text.num_prepared == 0
        for stream in accepted:
            stream.close()
        assert dispatcher.models[0].num_waiting == 0
        text.gate.set()
        dispatcher.enter(make_call()).close()


async def test_two_thousand_streams_all_end_and_nothing_is_left() -> None:
    engines = [ScriptedEngine(f"e/{n}", scripts=Script(tokens=["a"]), max_running=16) for n in range(2)]
    async with serving(make_pool(*engines)) as dispatcher:
        streams = [dispatcher.enter(make_call()) for _ in range(2000)]
        assert await asyncio.gather(*map(ending, streams)) == [FinishReason.EOS] * 2000
        await idle(dispatcher)
        assert_idle(dispatcher)


async def test_streams_being_tokenized_count_as_waiting() -> None:
    text = GatedText()
    async with serving(make_pool(ManualEngine(text=text), max_queue=1)) as dispatcher:
        stream = dispatcher.enter(make_call())
        preparing = asyncio.create_task(stream.prepare())
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            dispatcher.enter(make_call())
        text.gate.set()
        await preparing
        dispatcher.enter(make_call())


@pytest.mark.parametrize("phase", ["entered", "tokenizing", "waiting"])
@pytest.mark.parametrize(
    ("limit", "error"), [({"deadline_s": 0.1}, DeadlineExceeded), ({"max_queue_ns": 100_000_000}, QueueTimeout)]
)
async def test_limits_of_time_hold_in_every_phase_of_waiting(
    phase: str, limit: dict[str, float], error: type[MiniInferError]
) -> None:
    text = GatedText()
    engine = ManualEngine(text=text, max_running=1)
    async with serving(make_pool(engine, max_queue=2)) as dispatcher:
        text.gate.set()
        holder = dispatcher.enter(make_call())
        await placed(holder)
        if phase == "tokenizing":
            text.gate.clear()
        stream = dispatcher.enter(make_call(**limit))
        if phase == "entered":
            await until(lambda: stream.ended)
        started_ns = time.monotonic_ns()
        with pytest.raises(error):
            await read(stream)
        assert dispatcher.models[0].num_waiting == 0
        assert time.monotonic_ns() - started_ns < 5e9
        assert stream.timing.total_ns is not None
        assert stream.timing.total_ns >= 95_000_000
        assert engine.submitted == [holder.key]
        text.gate.set()


@pytest.mark.parametrize(
    ("late", "error"),
    [
        ({"deadline_s": -0.001}, DeadlineExceeded),
        ({"max_queue_ns": 1, "arrival_ns": time.monotonic_ns() - 10}, QueueTimeout),
    ],
)
async def test_a_call_that_is_late_already_is_refused(late: dict[str, float], error: type[MiniInferError]) -> None:
    async with serving(make_pool(ManualEngine())) as dispatcher:
        with pytest.raises(error):
            dispatcher.enter(make_call(**late))
        assert_idle(dispatcher)


async def test_no_wait_at_all_starts_at_once_where_a_slot_is_free() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call(max_queue_ns=0))
        await stream.prepare()
        assert engine.submitted == [stream.key]


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_no_wait_at_all_is_refused_before_tokenizing_where_no_slot_is_free(deadline_s: float | None) -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        await placed(dispatcher.enter(make_call()))
        with pytest.raises(QueueTimeout) as caught:
            dispatcher.enter(make_call(max_queue_ns=0, deadline_s=deadline_s))
        assert 0.1 <= caught.value.retry_after_s <= 60
        assert dispatcher.models[0].num_waiting == 0


async def test_no_wait_at_all_is_refused_where_the_slot_was_taken_while_it_was_tokenized() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        hasty, other = dispatcher.enter(make_call(max_queue_ns=0)), dispatcher.enter(make_call())
        await placed(other)
        with pytest.raises(QueueTimeout):
            await hasty.prepare()
        assert engine.submitted == [other.key]


async def test_a_running_stream_is_left_to_its_engine_at_its_deadline() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"], repeat=True, step_s=0.001))
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call(deadline_s=0.1))
        assert await ending(stream) is DeadlineExceeded
        assert stream.timing.times.num_tokens == stream.num_tokens > 0
        await idle(dispatcher)


async def test_an_engine_that_misses_a_deadline_is_backed_up() -> None:
    engine = ManualEngine(obedient=False)
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call(deadline_s=0.05))
        await placed(stream)
        engine.begin(stream.key)
        engine.token(stream.key)
        with pytest.raises(DeadlineExceeded):
            await rest(stream)
        assert engine.cancelled == [stream.key]
        assert (stream.num_tokens, stream.timing.time_to_first_token_ns is not None) == (1, True)
        assert dispatcher.engines[0].num_running == 1


async def test_the_limit_of_a_wait_does_not_end_a_stream_that_runs() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call(max_queue_ns=500_000_000))
        await placed(stream)
        waiting = dispatcher.enter(make_call(max_queue_ns=600_000_000))
        assert await ending(waiting) is QueueTimeout  # so the first one's limit has passed
        assert not stream.ended
        engine.finish(stream.key)
        assert len(await rest(stream)) == 1


async def test_a_bad_request_is_refused_by_prepare_and_frees_its_place() -> None:
    async with serving(make_pool(ManualEngine(), max_queue=1)) as dispatcher:
        for _ in range(3):
            with pytest.raises(InvalidRequest) as caught:
                await read(dispatcher.enter(make_call("")))
            assert caught.value.field == "prompt"
            assert_idle(dispatcher)


async def test_a_tokenizer_that_breaks_fails_its_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedText):
        def prepare(self, request: Request) -> object:  # type: ignore[override]
            if request.prompt == "break":
                raise ZeroDivisionError("a secret")
            return super().prepare(request)

    async with serving(make_pool(ScriptedEngine(text=Broken()))) as dispatcher:
        with pytest.raises(StreamFailed) as caught:
            await read(dispatcher.enter(make_call("break")))
        assert "secret" not in str(caught.value)
        assert "ZeroDivisionError" in caplog.text
        assert await ending(dispatcher.enter(make_call())) is FinishReason.EOS


async def test_a_reader_that_goes_away_while_its_prompt_is_tokenized_leaves_nothing() -> None:
    text = GatedText()
    engine = ManualEngine(text=text)
    async with serving(make_pool(engine)) as dispatcher:
        readers = [asyncio.create_task(read(dispatcher.enter(make_call()))) for _ in range(10)]
        await asyncio.sleep(0)
        for reader in readers:
            reader.cancel()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert_idle(dispatcher)
        text.gate.set()
        await (last := dispatcher.enter(make_call())).prepare()
        assert text.num_prepared <= 3  # the two that were under way, and the last
        assert engine.submitted == [last.key]


@pytest.mark.parametrize("phase", ["waiting", "running"])
async def test_a_reader_that_goes_away_frees_its_place_or_slot(phase: str) -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate()))
    async with serving(make_pool(engine)) as dispatcher:
        running, waiting = (dispatcher.enter(make_call()) for _ in range(2))
        await placed(running)
        await waiting.prepare()
        readers = {"running": asyncio.create_task(rest(running)), "waiting": asyncio.create_task(rest(waiting))}
        await asyncio.sleep(0)
        readers[phase].cancel()
        with pytest.raises(asyncio.CancelledError):
            await readers[phase]
        await until(lambda: dispatcher.models[0].num_waiting == 0)
        (running if phase == "waiting" else waiting).close()
        await idle(dispatcher)
        await asyncio.wait(readers.values())


async def test_unknown_models_and_engines_are_not_found() -> None:
    async with serving(make_pool(ManualEngine("a/0"), model="a"), make_pool(ManualEngine("b/0"), model="b")) as both:
        for call, reason in [
            (make_call(model="c"), "MODEL_NOT_FOUND"),
            (make_call(model="a", engine_id="b/0"), "ENGINE_NOT_FOUND"),
            (make_call(model="a", engine_kind="pipeline"), "ENGINE_NOT_FOUND"),
            (make_call(model="a", engine_id=""), "ENGINE_NOT_FOUND"),
        ]:
            with pytest.raises(NotFound) as caught:
                both.enter(call)
            assert caught.value.reason == reason
        with pytest.raises(InvalidRequest) as refused:
            both.enter(make_call(model=""))
        assert refused.value.field == "model"


async def test_the_queues_of_two_models_are_apart() -> None:
    pools = [make_pool(ManualEngine(f"{model}/0"), model=model, max_queue=1) for model in "ab"]
    async with serving(*pools) as dispatcher:
        dispatcher.enter(make_call(model="a"))
        with pytest.raises(QueueFull):
            dispatcher.enter(make_call(model="a"))
        dispatcher.enter(make_call(model="b"))
        assert [model.num_waiting for model in dispatcher.models] == [1, 1]


async def test_retry_times_follow_the_rate_of_departures() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine, max_queue=1)) as dispatcher:
        holder = dispatcher.enter(make_call())
        await placed(holder)
        waiting = dispatcher.enter(make_call())
        refusals = []
        for _ in range(2):
            with pytest.raises(Overloaded) as caught:
                dispatcher.enter(make_call())
            refusals.append(caught.value.retry_after_s)
        assert 0.1 <= refusals[0] < refusals[1] <= 60
        waiting.close()


async def test_the_pace_is_measured_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spy(Pace):
        calls: list[str] = []  # noqa: RUF012  # one test's

        def begin(self, now_ns: int) -> None:
            self.calls.append("begin")
            super().begin(now_ns)

        def left(self, now_ns: int) -> None:
            self.calls.append("left")
            super().left(now_ns)

    async with serving(make_pool(ManualEngine())) as dispatcher:
        dispatcher._queues["m"]._pace = Spy()
        await placed(dispatcher.enter(make_call()))
        streams = [dispatcher.enter(make_call()) for _ in range(2)]
        for stream in streams:
            stream.close()
        assert Spy.calls == ["begin", "left", "begin", "left", "left"]


async def test_a_finished_stream_reports_its_engine() -> None:
    async with serving(make_pool(ScriptedEngine())) as dispatcher:
        stream = dispatcher.enter(make_call("one two"))
        events = await read(stream)
        assert "".join(event.text for event in events if hasattr(event, "text")) == "one two"
        assert isinstance(events[-1], Finished)
        assert stream.served_by is not None
        assert (stream.served_by.engine_id, stream.served_by.devices) == ("scripted/0", ("cpu",))
