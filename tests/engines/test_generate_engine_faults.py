"""GenerateEngine on SCRIPT: cancelling, deadlines, stamps, and every kind of failure."""

import gc
import logging
import random
import threading
import time
import weakref

import psutil
import pytest
import torch
from support.events import Recorder, ask, assert_lawful, up
from support.scripted_model import HELLO, LONG, Gate, ModelScript, running, scripted_engine

from mini_infer.engines import generate_engine
from mini_infer.engines.api import (
    EngineState,
    Finished,
    FinishReason,
    OutputOptions,
    Sampling,
    StateChanged,
    StopConditions,
)
from mini_infer.engines.devices import is_out_of_memory
from mini_infer.engines.errors import DeadlineExceeded, Draining, EngineFailed, LoadError, OutOfMemory, StreamFailed


def held(num_allowed=0, **script):
    """A gate, and scripts in which the prompt "held" waits at it."""
    gate = Gate(num_allowed)
    return gate, {None: HELLO, "held": ModelScript(**{"ids": list(b"abc ") * 60, "gate": gate, **script})}


def assert_canary(engine, recorder, key="canary"):
    """A fixed request answers as ever, and nothing is left over."""
    ask(engine, key, "canary")
    assert isinstance(recorder.wait_end(key), Finished)
    assert recorder.text(key) == "Hello"
    assert engine.state is EngineState.READY
    assert engine.stats().num_running == 0
    assert not engine._inbox.held


def soon_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


# --- cancelling ---


def test_cancel_in_every_phase():
    gate, scripts = held()
    with running(scripts) as (engine, model, recorder):
        num_warm = model.num_forwards
        ask(engine, "prefilling", "held", stop=LONG)
        ask(engine, "waiting", "held", stop=LONG)
        gate.wait_arrived(1)
        engine.cancel("waiting")
        engine.cancel("prefilling")
        engine.cancel("unknown")
        gate.let()
        for key in ("prefilling", "waiting"):
            end = recorder.wait_end(key)
            assert (end.reason, end.usage.completion_tokens) == (FinishReason.CANCELLED, 0)
            assert_lawful(recorder, key)
        assert model.num_forwards - num_warm == 1

        ask(engine, "decoding", "held", stop=LONG)
        gate.let(3)
        gate.wait_arrived(5)
        engine.cancel("decoding")
        engine.cancel("decoding")
        gate.let()
        end = recorder.wait_end("decoding")
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.CANCELLED, 3)
        assert recorder.text("decoding") == "abc"
        engine.cancel("decoding")
        assert_lawful(recorder, "decoding")
        assert_canary(engine, recorder)


def test_cancel_at_the_last_token_and_after_it():
    gate, scripts = held(ids=b"ab")
    with running(scripts) as (engine, _, recorder):
        ask(engine, "last", "held")
        gate.let(2)
        gate.wait_arrived(3)  # the end token is being made
        engine.cancel("last")
        gate.let()
        assert recorder.wait_end("last").reason is FinishReason.CANCELLED
        gate.open()
        ask(engine, "after", "held")
        assert recorder.wait_end("after").reason is FinishReason.EOS
        engine.cancel("after")
        for key in ("last", "after"):
            assert_lawful(recorder, key)
        assert_canary(engine, recorder)


def test_a_waiting_stream_is_cancelled_while_another_decodes():
    gate, scripts = held(num_allowed=2)
    with running(scripts) as (engine, _, recorder):
        ask(engine, "decoding", "held", stop=LONG)
        ask(engine, "waiting", stop=LONG)
        gate.wait_arrived(3)
        engine.cancel("waiting")
        gate.let()
        assert recorder.wait_end("waiting").reason is FinishReason.CANCELLED
        assert not recorder.ends("decoding")
        gate.open()
        assert recorder.wait_end("decoding").reason is FinishReason.MAX_NEW_TOKENS


def test_cancels_at_random_moments_around_the_last_token():
    with running(ModelScript(ids=b"ab")) as (engine, _, recorder):
        rng = random.Random(0)
        keys = [f"{i}" for i in range(60)]
        for key in keys:
            ask(engine, key)
            threading.Event().wait(rng.uniform(0, 0.02))
            for _ in range(rng.randint(1, 2)):
                engine.cancel(key)
        for key in keys:
            end = recorder.wait_end(key)
            assert end.reason in (FinishReason.CANCELLED, FinishReason.EOS)
            assert_lawful(recorder, key)
        assert engine.stats().num_running == 0
        assert not engine._inbox.held
        assert not engine._inbox.cancelled


# --- deadlines ---


def test_deadline_in_every_phase():
    gate, scripts = held()
    with running(scripts) as (engine, _, recorder):
        ask(engine, "over", deadline_ns=soon_ns(-1))
        assert isinstance(recorder.wait_end("over").error, DeadlineExceeded)
        assert recorder.ends("over")[0].times.admitted_ns is None

        deadline_ns = soon_ns(1.0)
        ask(engine, "prefilling", "held", stop=LONG, deadline_ns=deadline_ns)
        ask(engine, "waiting", "held", stop=LONG, deadline_ns=deadline_ns)
        gate.wait_arrived(1)
        threading.Event().wait(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
        gate.let()
        for key in ("prefilling", "waiting"):
            failed = recorder.wait_end(key)
            assert isinstance(failed.error, DeadlineExceeded)
            assert failed.times.num_tokens == 0
            assert_lawful(recorder, key)
        assert recorder.ends("prefilling")[0].times.admitted_ns is not None
        assert_canary(engine, recorder)


def test_deadline_while_decoding_keeps_what_was_made():
    script = ModelScript(ids=list(b"abc ") * 60, step_s=0.02)
    with running(script) as (engine, _, recorder):
        ask(engine, "a", stop=LONG, deadline_ns=soon_ns(1.0))
        failed = recorder.wait_end("a")
        assert isinstance(failed.error, DeadlineExceeded)
        assert 0 < failed.times.num_tokens == recorder.num_tokens("a") < 100
        assert_lawful(recorder, "a")


# --- stamps ---


def test_a_slow_prefill_and_a_slow_step_grow_their_own_spans():
    def times(**script):
        with running({None: HELLO, "slow": ModelScript(ids=b"abc", **script)}) as (engine, _, recorder):
            ask(engine, "a", "slow")
            stamps = recorder.wait_end("a").times
            assert recorder.wait_started("a").at_ns == stamps.admitted_ns
            assert recorder.deltas("a")[0].first_token_ns == stamps.first_token_ns
            assert recorder.deltas("a")[-1].at_ns == stamps.last_token_ns
            return stamps.first_token_ns - stamps.admitted_ns, stamps.max_gap_ns

    prefill_ns, gap_ns = times(prefill_s=0.5)
    assert prefill_ns >= 5e8 > gap_ns
    prefill_ns, gap_ns = times(step_s=0.5)
    assert gap_ns >= 5e8 > prefill_ns


def test_waiting_grows_neither_prefill_nor_gaps():
    gate, scripts = held()
    with running(scripts) as (engine, _, recorder):
        ask(engine, "first", "held", stop=StopConditions(max_new_tokens=1))
        ask(engine, "second")
        gate.wait_arrived(1)
        assert not recorder.events("second")
        threading.Event().wait(0.5)
        gate.open()
        times = recorder.wait_end("second").times
        assert times.admitted_ns >= recorder.ends("first")[0].times.last_token_ns
        assert times.first_token_ns - times.admitted_ns < 5e8


def test_started_comes_before_the_prefill():
    gate, scripts = held()
    with running(scripts) as (engine, _, recorder):
        ask(engine, "a", "held", stop=StopConditions(max_new_tokens=1))
        gate.wait_arrived(1)
        recorder.wait_started("a")
        assert engine.stats().num_running == 1
        gate.open()
        recorder.wait_end("a")


def test_one_emit_for_each_token():
    with running() as (engine, _, recorder):
        ask(engine, "a")
        recorder.wait_end("a")
        batches = [batch for batch in recorder.batches if not isinstance(batch[0], StateChanged)]
        assert [len(batch) for batch in batches] == [1, 1, 1, 1, 1, 1, 2]  # Started, five letters, the end
        assert engine.stats().generated_tokens == 6


# --- failures of one stream ---


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_a_row_of_nan_fails_its_stream_alone(sampling):
    scripts = {None: HELLO, "bad": ModelScript(ids=b"abcdef", nan_at=4)}
    with running(scripts) as (engine, _, recorder):
        ask(engine, "bad", "bad", sampling=sampling)
        ask(engine, "next")
        failed = recorder.wait_end("bad")
        assert type(failed.error) is StreamFailed
        assert recorder.text("bad") == "abc"
        assert failed.times.num_tokens == 3
        assert recorder.wait_end("next").reason is FinishReason.EOS
        assert_lawful(recorder, "bad")
        assert_canary(engine, recorder)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
@pytest.mark.parametrize("fail_at", [1, 3])
def test_no_memory_fails_its_stream_alone(error, fail_at):
    scripts = {None: HELLO, "big": ModelScript(ids=b"abcdef", fail_at=fail_at, error=error)}
    with running(scripts) as (engine, _, recorder):
        ask(engine, "big", "big")
        ask(engine, "next")
        assert type(recorder.wait_end("big").error) is OutOfMemory
        assert recorder.text("big") == "abcdef"[: fail_at - 1]
        assert recorder.wait_end("next").reason is FinishReason.EOS
        assert_lawful(recorder, "big")
        assert_canary(engine, recorder)


def test_what_is_no_lack_of_memory():
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_tokenizer_that_breaks_ends_its_stream_alone(monkeypatch):
    class Breaking(generate_engine.TokenStreamer):
        def push(self, token_id, logprob=None):
            raise KeyError("no such token")

        def fail(self, error):
            super().fail(error)
            raise KeyError("nor this one")

    with running() as (engine, _, recorder):
        with monkeypatch.context() as patch:
            patch.setattr(generate_engine, "TokenStreamer", Breaking)
            ask(engine, "bad")
            assert isinstance(recorder.wait_end("bad").error, EngineFailed)
        assert_lawful(recorder, "bad")
        assert_canary(engine, recorder)


def test_stop_strings_that_cannot_be_meant_end_their_stream_alone():
    with running() as (engine, _, recorder):
        ask(engine, "bad", stop=StopConditions(strings=("",)))
        assert type(recorder.wait_end("bad").error) is StreamFailed
        assert_canary(engine, recorder)


# --- failures of the engine ---


@pytest.mark.parametrize("fail_at", [1, 3])
def test_a_broken_step_fails_its_stream_and_the_engine_proves_itself(fail_at, caplog):
    scripts = {None: HELLO, "bad": ModelScript(ids=b"abcdef", fail_at=fail_at)}
    with running(scripts) as (engine, _, recorder):
        ask(engine, "bad", "bad")
        ask(engine, "next")
        failed = recorder.wait_end("bad")
        assert type(failed.error) is EngineFailed
        assert "scripted failure" in failed.error.message
        assert recorder.text("bad") == "abcdef"[: fail_at - 1]
        assert recorder.wait_end("next").reason is FinishReason.EOS
        assert_lawful(recorder, "bad")
        assert "broke a step" in caplog.text
        assert_canary(engine, recorder)
        states = [e.state for e in recorder.events() if isinstance(e, StateChanged)]
        assert EngineState.FAILED not in states


def test_where_every_later_forward_fails_the_engine_is_failed_soon():
    gate, scripts = held()
    with running(scripts) as (engine, model, recorder):
        ask(engine, "running", "held", stop=LONG)
        ask(engine, "waiting", stop=LONG)
        gate.let(2)
        gate.wait_arrived(3)
        begin = time.monotonic()
        model.broken = RuntimeError("CUDA error: device-side assert triggered")
        gate.open()
        for key in ("running", "waiting"):
            assert type(recorder.wait_end(key).error) is EngineFailed
            assert_lawful(recorder, key)
        changed = recorder.wait_state(EngineState.FAILED)
        assert time.monotonic() - begin < 2
        assert "device-side assert" in changed.error.message
        assert engine.state is EngineState.FAILED
        ask(engine, "late")
        assert type(recorder.ends("late")[0].error) is EngineFailed


def test_an_interrupt_in_a_step_ends_the_engine_and_leaves_nobody_waiting():
    scripts = {None: HELLO, "bad": ModelScript(ids=b"ab", fail_at=2, error=SystemExit(1))}
    with running(scripts) as (engine, _, recorder):
        ask(engine, "bad", "bad")
        ask(engine, "waiting")
        for key in ("bad", "waiting"):
            assert type(recorder.wait_end(key).error) is EngineFailed
            assert_lawful(recorder, key)
        assert recorder.text("bad") == "a"


def test_an_emit_that_raises_is_no_broken_step():
    engine, _ = scripted_engine(HELLO)
    recorder = Recorder()

    def emit(events):
        if recorder.num_tokens("a") == 2 and engine.state is EngineState.READY:
            raise ValueError("the reader is gone")
        recorder(events)

    engine.start(emit)
    recorder.wait_state(EngineState.READY)
    ask(engine, "a")
    assert "the reader is gone" in recorder.wait_end("a").error.message
    assert engine.state is EngineState.FAILED
    engine.close()


@pytest.mark.parametrize("error", [LoadError("no such folder"), ValueError("odd file")])
def test_a_failed_load_is_a_load_error(error):
    engine, _ = scripted_engine(HELLO, load_error=error)
    recorder = Recorder()
    engine.start(recorder)
    changed = recorder.wait_state(EngineState.FAILED)
    engine.close()
    assert isinstance(changed.error, LoadError)
    assert str(error) in changed.error.message


@pytest.mark.parametrize("script", [ModelScript(fail_at=1), ModelScript(fail_at=2), ModelScript(nan_at=2)])
def test_a_model_that_cannot_generate_never_gets_ready(script):
    engine, _ = scripted_engine(script)
    recorder = Recorder()
    engine.start(recorder)
    assert isinstance(recorder.wait_state(EngineState.FAILED).error, LoadError)
    engine.close()
    states = [e.state for e in recorder.events() if isinstance(e, StateChanged)]
    assert states == [EngineState.LOADING, EngineState.WARMING_UP, EngineState.FAILED]


def test_close_in_mid_stream():
    gate, scripts = held()
    with running(scripts) as (engine, _, recorder):
        ask(engine, "running", "held", stop=LONG)
        ask(engine, "waiting", stop=LONG)
        gate.let(2)
        gate.wait_arrived(3)
        threading.Timer(0.05, gate.open).start()
        engine.close()
        for key in ("running", "waiting"):
            assert type(recorder.ends(key)[0].error) is Draining
            assert_lawful(recorder, key)
        assert recorder.text("running") == "ab"


def test_close_frees_the_model():
    engine, model = scripted_engine(HELLO)
    up(engine)
    engine.close()
    alive = weakref.ref(model)
    engine._load_model = None
    del model
    gc.collect()
    assert alive() is None


# --- memory (U6) ---


def test_a_stream_leaves_no_tensor_behind(caplog):
    caplog.set_level(logging.CRITICAL, "mini_infer.engines.generate_engine")  # pytest keeps records, and they frames
    scripts = {None: HELLO, "bad": ModelScript(ids=b"abcdef", fail_at=3), "nan": ModelScript(nan_at=2)}
    with running(scripts) as (engine, _, recorder):

        def rounds(name, number):
            for i in range(number):
                for prompt in ("good", "bad", "nan"):
                    ask(engine, f"{name}{i}{prompt}", prompt, output=OutputOptions(logprobs=True))
                    recorder.wait_end(f"{name}{i}{prompt}")
            assert_canary(engine, recorder, f"{name} canary")
            engine._executor.submit(int).result()  # the end is emitted inside `generate`, whose frames hold tensors
            recorder.batches.clear()
            gc.collect()
            return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

        rounds("warm", 2)
        after_few = rounds("few", 2)
        assert rounds("many", 6) < after_few + 4 * 3  # not one for each of the streams that there are more


@pytest.mark.full
def test_memory_is_flat_over_many_streams():
    with running() as (engine, _, recorder):

        def rss_after(name, number=100):
            for i in range(number):
                ask(engine, f"{name}{i}")
                recorder.wait_end(f"{name}{i}")
                recorder.batches.clear()
            gc.collect()
            return psutil.Process().memory_info().rss

        rss_after("warm")
        sizes = [rss_after(f"{n}-") for n in range(4)]
        assert sizes[-1] - sizes[0] < 3 * 100 * 1024, sizes
