"""Engines come up, die in every phase, fall silent, and speak from their own threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

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

from mini_infer.engines.api import (
    Delta,
    EngineState,
    Finished,
    FinishReason,
    PreparedRequest,
    Started,
    StreamTimes,
    Usage,
)
from mini_infer.engines.errors import Draining, EngineFailed, LoadError, NoReadyEngine, QueueFull, StreamFailed
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import EngineSnapshot
from mini_infer.server.text_calls import MAX_TEXT_CALLS


async def test_start_returns_while_engines_load_and_wait_ready_waits_for_all() -> None:
    gates = [threading.Event(), threading.Event()]
    engines = [ScriptedEngine(f"e/{n}", load_gate=gate) for n, gate in enumerate(gates)]
    async with serving(make_pool(*engines), ready=False) as dispatcher:
        ready = asyncio.create_task(dispatcher.wait_ready())
        with pytest.raises(NoReadyEngine):
            dispatcher.enter(make_call())
        with pytest.raises(NoReadyEngine):
            dispatcher.text_model("m")
        assert dispatcher.models[0].info is None
        gates[0].set()
        await until(lambda: dispatcher.engines[0].state is EngineState.READY)
        assert not ready.done()
        assert await ending(dispatcher.enter(make_call())) is FinishReason.EOS
        gates[1].set()
        await ready
        assert dispatcher.models[0].info is not None
        assert dispatcher.models[0].engine_ids == ("e/0", "e/1")


async def test_wait_ready_names_every_engine_that_did_not_load() -> None:
    engines = [
        ScriptedEngine("good"),
        ScriptedEngine("bad", load_error=LoadError("no such folder")),
        ScriptedEngine("ugly", load_error=ZeroDivisionError("oops")),
    ]
    async with serving(make_pool(*engines), ready=False) as dispatcher:
        with pytest.raises(LoadError, match=r"bad: no such folder; ugly: .*oops"):
            await dispatcher.wait_ready()
        assert [engine.state for engine in dispatcher.engines] == ["ready", "failed", "failed"]
        assert dispatcher.engines[1].failure == "no such folder"


async def test_an_engine_that_fails_without_a_word_fails_all_the_same() -> None:
    engine = ManualEngine(loads=False)
    async with serving(make_pool(engine), ready=False) as dispatcher:
        engine.become(EngineState.FAILED)
        with pytest.raises(LoadError, match="did not say why"):
            await dispatcher.wait_ready()


async def test_failed_is_for_good() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        engine.die()
        engine.become(EngineState.READY)
        await until(lambda: dispatcher.engines[0].failure == "it died")
        await asyncio.sleep(0.001)
        assert dispatcher.engines[0].state is EngineState.FAILED
        with pytest.raises(NoReadyEngine):
            dispatcher.enter(make_call())


async def test_wait_ready_ends_when_the_server_is_closed_meanwhile() -> None:
    dispatcher = Dispatcher([make_pool(ManualEngine(loads=False))])
    await dispatcher.start()
    ready = asyncio.create_task(dispatcher.wait_ready())
    await asyncio.sleep(0)
    await dispatcher.close()
    with pytest.raises(Draining):
        await ready


async def test_listeners_hear_every_change_in_order_and_cannot_harm_each_other() -> None:
    heard: list[tuple[str, str]] = []
    harm: list[object] = []

    def broken(engine: EngineSnapshot) -> None:
        raise ZeroDivisionError

    asyncio.get_running_loop().set_exception_handler(lambda _, context: harm.append(context["exception"]))
    dispatcher = Dispatcher([make_pool(ScriptedEngine(scripts=Script(fail_at=1, error=RuntimeError("boom"))))])
    dispatcher.on_change(broken)
    dispatcher.on_change(lambda engine: heard.append((engine.state, engine.failure)))
    await dispatcher.start()
    await dispatcher.wait_ready()
    assert await ending(dispatcher.enter(make_call())) is EngineFailed
    await dispatcher.close()
    assert [state for state, _ in heard] == ["warming_up", "ready", "failed"]
    assert heard[-1][1].endswith("RuntimeError: boom")
    assert len(harm) == 3


async def test_an_engine_that_dies_fails_its_own_streams_and_the_others_go_on() -> None:
    gate = Gate()
    dying = ScriptedEngine("a", scripts=Script(fail_at=1, error=RuntimeError("boom"), gate=gate), max_running=2)
    living = ScriptedEngine("b", scripts=Script(tokens=["x"], gate=(open_later := Gate())), max_running=2)
    async with serving(make_pool(dying, living)) as dispatcher:
        streams = [dispatcher.enter(make_call()) for _ in range(8)]
        ends = [asyncio.create_task(ending(stream)) for stream in streams]
        await until(lambda: sum(engine.num_running for engine in dispatcher.engines) == 4)
        gate.open()
        await until(lambda: dispatcher.engines[0].state is EngineState.FAILED)
        open_later.open()
        results = await asyncio.gather(*ends)
        assert sorted(map(str, results)) == sorted([str(EngineFailed)] * 2 + ["eos"] * 6)
        assert all(stream.served_by is not None for stream in streams)
        await idle(dispatcher)


@pytest.mark.parametrize("pin", [None, "a"])
async def test_when_the_last_engine_that_they_can_have_dies_all_who_wait_end_at_once(pin: str | None) -> None:
    text = GatedText()
    text.gate.set()
    engines = [ManualEngine("a", text=text)] + ([ManualEngine("b", text=text)] if pin else [])
    async with serving(make_pool(*engines)) as dispatcher:
        running = dispatcher.enter(make_call(engine_id=pin))
        await placed(running)
        waiting, tokenizing, entered = (dispatcher.enter(make_call(engine_id=pin)) for _ in range(3))
        await waiting.prepare()
        text.gate.clear()
        ends = [asyncio.create_task(end) for end in (read(tokenizing), rest(running), rest(waiting))]
        await asyncio.sleep(0)
        engines[0].die()
        errors = await asyncio.gather(*ends, return_exceptions=True)
        assert [type(error) for error in errors] == [NoReadyEngine, EngineFailed, NoReadyEngine]
        assert await ending(entered) is NoReadyEngine
        assert dispatcher.models[0].num_waiting == 0
        with pytest.raises(NoReadyEngine):
            dispatcher.enter(make_call(engine_id=pin))
        text.gate.set()


async def test_an_engine_that_dies_while_it_admits_a_stream_fails_it() -> None:
    def broken(request: PreparedRequest) -> Script:
        raise ZeroDivisionError("at admission")

    async with serving(make_pool(ScriptedEngine(scripts=broken))) as dispatcher:
        assert await ending(dispatcher.enter(make_call())) is EngineFailed
        assert dispatcher.engines[0].state is EngineState.FAILED


async def test_a_stream_given_to_an_engine_that_is_dead_already_gets_its_failed() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine)) as dispatcher:
        engine.state = EngineState.FAILED  # and nobody has been told
        assert await ending(dispatcher.enter(make_call())) is EngineFailed


async def test_a_stream_that_fails_alone_leaves_its_engine_in_rotation() -> None:
    scripts = {"bad": Script(tokens=["a", "b"], fail_at=2), "good": Script(tokens=["a"])}
    async with serving(make_pool(ScriptedEngine(scripts=scripts))) as dispatcher:
        bad = dispatcher.enter(make_call("bad"))
        assert await ending(bad) is StreamFailed
        assert bad.num_tokens == 1
        assert await ending(dispatcher.enter(make_call("good"))) is FinishReason.EOS


async def test_late_events_are_dropped_and_free_the_slot() -> None:
    engine = ManualEngine(obedient=False)
    async with serving(make_pool(engine)) as dispatcher:
        stream = dispatcher.enter(make_call())
        async with stream:
            await placed(stream)
        seen = stream.timing
        engine.begin(stream.key)
        engine.token(stream.key)
        engine.finish(stream.key)
        await idle(dispatcher)
        assert stream.timing == seen
        engine.emit(Started(stream.key, 1), Finished("nobody", FinishReason.EOS, Usage(1, 1), StreamTimes()))
        await asyncio.sleep(0)
        assert_idle(dispatcher)


async def test_one_emit_is_one_call_into_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ManualEngine(max_running=64)
    async with serving(make_pool(engine)) as dispatcher:
        streams = [dispatcher.enter(make_call()) for _ in range(64)]
        await asyncio.gather(*(stream.prepare() for stream in streams))
        loop, calls = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe

        def counting(callback: Callable[..., object], *args: object, **context: object) -> asyncio.Handle:
            calls.append(callback)
            return real(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        events = [
            event
            for stream in streams
            for event in (
                Started(stream.key, 1),
                Delta(stream.key, "a", (1,), 1, 2, first_token_ns=2),
                Finished(stream.key, FinishReason.EOS, Usage(1, 1), StreamTimes()),
            )
        ]
        thread = threading.Thread(target=engine.emit, args=events)
        thread.start()
        thread.join()
        assert len(calls) == 1
        engine.held.clear()
        for stream in streams:
            kinds = [type(event) async for event in stream]
            assert kinds == [Started, Delta, Finished]


async def test_the_watchdog_takes_out_an_engine_that_hangs() -> None:
    hanging = ScriptedEngine("a", scripts=Script(tokens=["x"], hang_at=1))
    working = ScriptedEngine("b", scripts=Script(tokens=["x"]))
    async with serving(make_pool(hanging, working), stall_timeout_s=0.2) as dispatcher:
        stuck = dispatcher.enter(make_call(engine_id="a"))
        await placed(stuck)
        waiting = dispatcher.enter(make_call(engine_id="a"))
        errors = await asyncio.gather(rest(stuck), read(waiting), return_exceptions=True)
        assert [type(error) for error in errors] == [EngineFailed, NoReadyEngine]
        snapshot = dispatcher.engines[0]
        assert (snapshot.state, snapshot.num_running) == (EngineState.FAILED, 1)
        assert "no progress for 0.2 s" in snapshot.failure
        with pytest.raises(NoReadyEngine):
            dispatcher.enter(make_call(engine_id="a"))
        for _ in range(3):
            assert await ending(dispatcher.enter(make_call())) is FinishReason.EOS


@pytest.mark.parametrize(
    ("step_age_s", "submit_age_s", "state"),
    [
        (700, 700, EngineState.FAILED),
        (700, 1, EngineState.READY),
        (1, 700, EngineState.READY),
        (None, 1, EngineState.READY),
    ],
)
async def test_a_step_and_a_new_stream_are_signs_of_life(
    step_age_s: int | None, submit_age_s: int, state: EngineState
) -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine), stall_timeout_s=600.0) as dispatcher:
        await placed(dispatcher.enter(make_call()))
        now_ns = time.monotonic_ns()
        engine.last_step_ns = None if step_age_s is None else now_ns - step_age_s * 1_000_000_000
        dispatcher._queues["m"].slots[0]._newest_submit_ns = now_ns - submit_age_s * 1_000_000_000
        dispatcher._watch()
        assert dispatcher.engines[0].state is state


async def test_an_idle_engine_owes_no_sign_of_life() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine), stall_timeout_s=600.0) as dispatcher:
        engine.last_step_ns = 1
        dispatcher._watch()
        assert dispatcher.engines[0].state is EngineState.READY


async def test_the_watchdog_ends_what_a_dead_engine_forgot() -> None:
    engine = ManualEngine()
    async with serving(make_pool(engine), stall_timeout_s=0.05) as dispatcher:
        stream = dispatcher.enter(make_call())
        await placed(stream)
        engine.die(loudly=False)
        with pytest.raises(EngineFailed):
            await rest(stream)
        engine.emit(Finished(stream.key, FinishReason.EOS, Usage(1, 1), StreamTimes()))
        await idle(dispatcher)


async def test_the_watchdog_ends_a_prompt_stuck_in_its_tokenizer() -> None:
    text = GatedText()
    async with serving(make_pool(ManualEngine(text=text)), stall_timeout_s=0.05) as dispatcher:
        assert await ending(dispatcher.enter(make_call())) is StreamFailed
        text.gate.set()


async def test_the_watchdog_is_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, delays = asyncio.get_running_loop(), []
    real = loop.call_later

    def recording(delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        delays.append(delay)
        return real(delay, callback, *args)

    monkeypatch.setattr(loop, "call_later", recording)
    async with serving(make_pool(*(ScriptedEngine(f"e/{n}", max_running=8) for n in range(4)))) as dispatcher:
        await asyncio.gather(*(ending(dispatcher.enter(make_call())) for _ in range(50)))
        assert [delay for delay in delays if delay > 100] == [150.0]


async def test_text_calls_run_off_the_loop_and_are_bounded() -> None:
    threads: set[int] = set()
    release = threading.Event()

    class Watched(GatedText):
        def tokenize(self, text: object) -> tuple[int, ...]:
            threads.add(threading.get_ident())
            release.wait(10)
            return super().tokenize(text)  # type: ignore[arg-type]

    async with serving(make_pool(ManualEngine(text=Watched()))) as dispatcher:
        model = dispatcher.text_model("m")
        calls = [asyncio.create_task(model.tokenize("a b")) for _ in range(MAX_TEXT_CALLS)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await model.tokenize("a b")
        release.set()
        assert len(set(await asyncio.gather(*calls))) == 1
        assert await model.detokenize((65, 66)) == "AB"
        assert model.info.context_length == 4096
        assert threading.get_ident() not in threads
    with pytest.raises(Draining):
        await model.tokenize("a b")


async def test_a_text_call_under_way_at_close_ends_well() -> None:
    release = threading.Event()

    class Slow(GatedText):
        def tokenize(self, text: object) -> tuple[int, ...]:
            release.wait(10)
            return (1,)

    async with serving(make_pool(ManualEngine(text=Slow()))) as dispatcher:
        model = dispatcher.text_model("m")
        calls = [asyncio.create_task(model.tokenize("a")) for _ in range(3)]
        await asyncio.sleep(0.01)
    release.set()
    assert await asyncio.gather(*calls) == [(1,)] * 3


async def test_an_engine_that_does_not_close_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Stubborn(ManualEngine):
        def close(self) -> None:
            release.wait(10)

    async with serving(make_pool(Stubborn()), close_timeout_s=0.05):
        pass
    assert "did not close within 0.05 s" in caplog.text
    release.set()


async def test_what_an_engine_says_to_a_closed_loop_is_dropped() -> None:
    engine = ManualEngine()

    async def serve() -> None:
        async with serving(make_pool(engine)):
            pass

    await asyncio.to_thread(asyncio.run, serve())
    engine.become(EngineState.READY)


async def test_events_between_enter_and_reader_are_kept() -> None:
    async with serving(make_pool(ScriptedEngine(scripts=Script(tokens=list("abc"))))) as dispatcher:
        stream = dispatcher.enter(make_call())
        await stream.prepare()
        await until(lambda: stream.ended)
        kinds = [type(event).__name__ async for event in stream]
        assert kinds == ["Started", "Delta", "Delta", "Delta", "Finished"]
        assert await ending(dispatcher.enter(make_call())) is FinishReason.EOS
        assert isinstance((await read(dispatcher.enter(make_call())))[0], Started)
