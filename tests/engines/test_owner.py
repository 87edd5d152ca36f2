import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.events import WAIT_S, Recorder, ask, assert_lawful, up

from mini_infer.engines import life_cycle
from mini_infer.engines.api import (
    Delta,
    EngineState,
    Failed,
    Finished,
    FinishReason,
    Started,
    StateChanged,
    StopConditions,
)
from mini_infer.engines.errors import DeadlineExceeded, Draining, EngineFailed, LoadError, NoReadyEngine
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine

ENDLESS = Script(tokens=["a "], repeat=True)
LONG = StopConditions(max_new_tokens=4000)


class TwoThreaded(ScriptedEngine):
    """Leaves all that streams hear after `Started` to a second thread, as engines do that make text there."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.second = ThreadPoolExecutor(1)
        self.may_speak = threading.Event()
        self.may_speak.set()

    def _post(self, *events):
        for event in events:
            if isinstance(event, Started):
                super()._post(event)
            else:
                self.second.submit(self._speak, event)

    def _speak(self, event):
        assert self.may_speak.wait(WAIT_S)
        self._pass_on([event])

    def _abandon(self, error):
        super()._abandon(error)
        self.second.shutdown(wait=True)


either_engine = pytest.mark.parametrize("engine_class", [ScriptedEngine, TwoThreaded])


@contextlib.contextmanager
def running(engine: ScriptedEngine) -> Iterator[Recorder]:
    try:
        yield up(engine)
    finally:
        engine.close()


def soon_ns(seconds: float = 0.05) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_states_come_in_order_and_the_thread_is_named_after_the_engine():
    names = set()

    class Named(ScriptedEngine):
        def _step(self):
            names.add(threading.current_thread().name.rpartition("_")[0])
            super()._step()

    engine = Named("some/7")
    with running(engine) as recorder:
        ask(engine, "a")
        recorder.wait_end("a")
    states = [e.state for e in recorder.events() if isinstance(e, StateChanged)]
    assert states == [EngineState.LOADING, EngineState.WARMING_UP, EngineState.READY, EngineState.DRAINING]
    assert names == {"some/7"}


def test_before_ready_streams_are_refused_and_text_is_not_there():
    gate = threading.Event()
    engine = ScriptedEngine(load_gate=gate)
    prepared = engine._scripted_text
    with pytest.raises(NoReadyEngine):
        _ = engine.text
    recorder = Recorder()
    engine.start(recorder)
    recorder.wait_state(EngineState.LOADING)
    request = _prepared(prepared, "early")
    engine.submit(request)
    assert isinstance(recorder.wait_end("early").error, NoReadyEngine)
    gate.set()
    recorder.wait_state(EngineState.READY)
    engine.close()


def test_start_twice_is_refused():
    engine = ScriptedEngine()
    with running(engine), pytest.raises(RuntimeError):
        engine.start(Recorder())


def test_a_key_in_use_is_refused_and_the_first_stream_goes_on():
    gate = Gate()
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=gate))
    with running(engine) as recorder:
        ask(engine, "a")
        recorder.wait_started("a")
        with pytest.raises(ValueError, match="already here"):
            ask(engine, "a")
        gate.open()
        assert isinstance(recorder.wait_end("a"), Finished)


def test_load_failure_is_a_load_error_and_newcomers_fail_at_once():
    engine = ScriptedEngine(load_error=LoadError("no such folder"))
    recorder = Recorder()
    engine.start(recorder)
    changed = recorder.wait_state(EngineState.FAILED)
    assert isinstance(changed.error, LoadError)
    assert changed.error.message == "no such folder"
    engine.submit(_prepared(engine._scripted_text, "late"))
    assert isinstance(recorder.ends("late")[0].error, EngineFailed)
    engine.close()
    assert engine.state is EngineState.FAILED


def test_any_exception_while_loading_becomes_a_load_error():
    engine = ScriptedEngine(load_error=OSError("disk gone"))
    recorder = Recorder()
    engine.start(recorder)
    error = recorder.wait_state(EngineState.FAILED).error
    assert isinstance(error, LoadError)
    assert "disk gone" in error.message
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)])
def test_a_crash_fails_running_and_waiting_streams(error):
    gate = Gate()
    scripts = {"bad": Script(tokens=["x", "y"], gate=gate, fail_at=2, error=error), "good": ENDLESS}
    engine = ScriptedEngine(scripts=scripts, max_running=2)
    with running(engine) as recorder:
        ask(engine, "bad", "bad")
        ask(engine, "good", "good", stop=LONG)
        ask(engine, "waiting", "good", stop=LONG)
        recorder.wait_tokens("good", 1)
        gate.open()
        for key in ("bad", "good", "waiting"):
            assert isinstance(recorder.wait_end(key).error, EngineFailed)
            assert_lawful(recorder, key)
        assert recorder.wait_state(EngineState.FAILED).error is not None
        assert engine.state is EngineState.FAILED
        assert engine.stats().num_running == 0
        engine.submit(_prepared(engine.text, "after"))
        assert isinstance(recorder.ends("after")[0].error, EngineFailed)


@either_engine
def test_state_changes_before_the_streams_hear_of_it(engine_class):
    engine = engine_class(scripts=Script(fail_at=1, error=RuntimeError("boom")))
    with running(engine) as recorder:
        ask(engine, "a")
        recorder.wait_end("a")
        kinds = [type(e) for e in recorder.events()]
        assert kinds.index(Failed) > len(kinds) - 1 - kinds[::-1].index(StateChanged)


@either_engine
def test_close_fails_what_is_left_and_is_idempotent(engine_class):
    engine = engine_class(scripts=ENDLESS)
    with running(engine) as recorder:
        ask(engine, "running", stop=LONG)
        ask(engine, "waiting", stop=LONG)
        recorder.wait_tokens("running", 1)
        engine.close()
        engine.close()
        for key in ("running", "waiting"):
            assert isinstance(recorder.ends(key)[0].error, Draining)
            assert_lawful(recorder, key)
        engine.submit(_prepared(engine.text, "after"))
        assert isinstance(recorder.ends("after")[0].error, Draining)


def test_close_before_start_and_during_load():
    ScriptedEngine().close()
    engine, recorder = ScriptedEngine(load_s=3600), Recorder()
    engine.start(recorder)
    recorder.wait_state(EngineState.LOADING)
    engine.close()  # leaves the load behind, which gives itself up
    recorder.wait_state(EngineState.DRAINING)
    assert [event.state for event in recorder.events()] == [EngineState.LOADING, EngineState.DRAINING]


def test_close_gives_up_on_a_step_that_hangs(monkeypatch):
    monkeypatch.setattr(life_cycle, "CLOSE_TIMEOUT_S", 0.1)
    hung, release = threading.Event(), threading.Event()

    class Hanging(ScriptedEngine):
        def _advance(self, stream):
            hung.set()
            release.wait()
            super()._advance(stream)

    engine = Hanging(scripts=ENDLESS)
    recorder = up(engine)
    ask(engine, "a", stop=LONG)
    ask(engine, "b", stop=LONG)
    assert hung.wait(WAIT_S)
    engine.close()
    for key in ("a", "b"):
        assert isinstance(recorder.ends(key)[0].error, Draining)
    release.set()  # what the thread still says of them is dropped
    engine._executor.shutdown(wait=True)
    for key in ("a", "b"):
        assert_lawful(recorder, key)


def test_a_hang_in_a_script_ends_with_close():
    engine = ScriptedEngine(scripts=Script(tokens=["a", "b"], hang_at=2))
    with running(engine) as recorder:
        ask(engine, "a")
        recorder.wait_tokens("a", 1)
        engine.close()
        assert isinstance(recorder.wait_end("a").error, Draining)


def test_cancel_while_waiting_running_and_after_the_end():
    gate = Gate(2)
    engine = ScriptedEngine(scripts=Script(tokens=["a "], repeat=True, gate=gate))
    with running(engine) as recorder:
        ask(engine, "running", stop=LONG)
        ask(engine, "waiting", stop=LONG)
        recorder.wait_tokens("running", 2)
        engine.cancel("waiting")
        end = recorder.wait_end("waiting")
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.CANCELLED
        assert end.usage.completion_tokens == 0
        engine.cancel("running")
        engine.cancel("running")
        engine.cancel("nobody")
        end = recorder.wait_end("running")
        assert end.reason is FinishReason.CANCELLED
        assert end.usage.completion_tokens == 2
        engine.cancel("running")
        gate.open()
        ask(engine, "next", stop=StopConditions(max_new_tokens=1))
        assert recorder.wait_end("next").reason is FinishReason.MAX_NEW_TOKENS
        for key in ("running", "waiting", "next"):
            assert_lawful(recorder, key)


def test_deadlines_of_waiting_and_of_held_streams_are_kept_without_polling():
    gate = Gate()
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=gate))
    with running(engine) as recorder:
        ask(engine, "running", deadline_ns=soon_ns(1.0))
        recorder.wait_started("running")
        ask(engine, "waiting", deadline_ns=soon_ns(0.05))
        assert isinstance(recorder.wait_end("waiting").error, DeadlineExceeded)
        assert isinstance(recorder.wait_end("running").error, DeadlineExceeded)
        assert engine.num_steps == 0


def test_a_deadline_that_is_over_already_starts_nothing():
    engine = ScriptedEngine()
    with running(engine) as recorder:
        ask(engine, "late", deadline_ns=time.monotonic_ns() - 1)
        assert isinstance(recorder.wait_end("late").error, DeadlineExceeded)
        assert engine.num_prefills == 0


def test_an_idle_engine_does_not_wake():
    wakes = []

    class Counting(ScriptedEngine):
        def _sweep(self):
            wakes.append(1)
            super()._sweep()

    engine = Counting()
    with running(engine):
        assert not wakes
        engine._closing.wait(0.1)
        assert not wakes


@either_engine
def test_an_emit_that_raises_ends_the_engine_aloud(engine_class, caplog):
    recorder = Recorder()

    def emit(events):
        if any(isinstance(e, Finished) for e in events):
            raise ValueError("the reader is gone")
        recorder(events)

    engine = engine_class(scripts=Script(tokens=["a"]))
    engine.start(emit)
    recorder.wait_state(EngineState.READY)
    ask(engine, "a")
    end = recorder.wait_end("a")  # its Finished was lost, so it is owed an end
    assert isinstance(end, Failed)
    assert engine.state is EngineState.FAILED
    assert "the reader is gone" in caplog.text
    engine.close()


def test_an_emit_that_always_raises_leaves_nothing_hanging(caplog):
    def emit(events):
        raise ValueError("nobody")

    engine = ScriptedEngine()
    engine.start(emit)
    engine.close()
    assert engine.state is EngineState.FAILED
    engine.submit(_prepared(engine._scripted_text, "a"))
    assert "nobody" in caplog.text


@either_engine
@pytest.mark.parametrize("ending", ["close", "crash"])
def test_every_stream_has_exactly_one_end_whatever_races(engine_class, ending):
    for seed in range(30):
        rng = random.Random(seed)
        error = RuntimeError("boom")
        scripts = {
            "endless": ENDLESS,
            "short": Script(tokens=["a", "b"]),
            "crash": Script(tokens=["a"], fail_at=rng.randint(1, 3), error=error),
        }
        engine = engine_class(scripts=scripts, max_running=rng.randint(1, 3))
        recorder = up(engine)
        keys = [f"{i}" for i in range(40)]

        def submit(mine, rng=rng, engine=engine):
            for key in mine:
                ask(engine, key, rng.choice(["endless", "short"]), stop=LONG)

        def cancel(engine=engine, keys=keys, rng=rng):
            for key in rng.sample(keys, 30) * 2:
                engine.cancel(key)

        threads = [threading.Thread(target=submit, args=(keys[i::2],)) for i in range(2)]
        threads.append(threading.Thread(target=cancel))
        for thread in threads:
            thread.start()
        if ending == "crash":
            ask(engine, "crash", "crash")
            for key in keys:
                engine.cancel(key)
            recorder.wait_end("crash")
        else:
            engine.close()
        for thread in threads:
            thread.join()
        engine.close()
        for key in keys:
            assert_lawful(recorder, key)
        assert not engine._inbox.held
        assert not engine._inbox.cancelled
        assert engine.stats().num_running == 0


# --- a second thread that hands over events ---


def wait_until_at_rest(engine):
    """Returns when the owner thread has no task left; a task that is given to it meanwhile comes later."""
    engine._executor.submit(int).result(WAIT_S)


def test_an_end_that_passes_on_the_second_thread_gives_its_slot_to_the_next_stream():
    engine = TwoThreaded(scripts=Script(tokens=["a"]))
    with running(engine) as recorder:
        engine.may_speak.clear()
        ask(engine, "first")
        ask(engine, "second")
        recorder.wait_started("first")
        assert not recorder.events("second")
        engine.may_speak.set()
        for key in ("first", "second"):
            assert isinstance(recorder.wait_end(key), Finished)
            assert_lawful(recorder, key)


def test_the_owner_rests_when_the_second_thread_has_passed_the_last_end():
    engine = TwoThreaded(scripts=Script(tokens=["a"]))
    with running(engine) as recorder:
        ask(engine, "a")
        recorder.wait_end("a")
        wait_until_at_rest(engine)
        ask(engine, "b")
        assert isinstance(recorder.wait_end("b"), Finished)


@pytest.mark.parametrize("owner_is", ["waiting", "at rest"])
def test_events_of_the_second_thread_that_nobody_takes_end_the_engine(owner_is, caplog):
    recorder = Recorder()
    engine = TwoThreaded(scripts=Script(tokens=["a"]), max_running=2)
    fails = [Finished] if owner_is == "at rest" else [Delta]

    def emit(events):
        if fails and isinstance(events[0], fails[0]):
            fails.clear()
            if owner_is == "at rest":
                wait_until_at_rest(engine)
            raise ValueError("the reader is gone")
        recorder(events)

    engine.start(emit)
    recorder.wait_state(EngineState.READY)
    ask(engine, "a")
    assert isinstance(recorder.wait_end("a").error, EngineFailed)
    assert recorder.wait_state(EngineState.FAILED).error.message.endswith("ValueError: the reader is gone")
    assert_lawful(recorder, "a")
    engine.close()


def test_hand_overs_do_not_overlap_so_nothing_follows_an_end(monkeypatch):
    monkeypatch.setattr(life_cycle, "CLOSE_TIMEOUT_S", 0.05)
    recorder, inside, free = Recorder(), threading.Event(), threading.Event()

    def emit(events):
        if isinstance(events[0], Delta) and not inside.is_set():
            inside.set()
            assert free.wait(WAIT_S)
        recorder(events)

    engine = TwoThreaded(scripts=ENDLESS)
    engine.start(emit)
    recorder.wait_state(EngineState.READY)
    ask(engine, "a", stop=LONG)
    assert inside.wait(WAIT_S)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.2)  # it cannot get through; were there no turns, it would
    free.set()
    closer.join(WAIT_S)
    engine._executor.shutdown(wait=True)
    assert recorder.deltas("a")
    assert_lawful(recorder, "a")


def _prepared(text, key):
    from mini_infer.engines.api import Request

    return text.prepare(Request(key=key, prompt="Hello"))


def test_a_process_that_forgets_to_close_can_exit():
    code = """
from mini_infer.engines.api import EngineState
from mini_infer.engines.scripted_engine import ScriptedEngine
import threading
ready = threading.Event()
ScriptedEngine().start(lambda events: ready.set() if events[0].state is EngineState.READY else None)
assert ready.wait(20)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
