"""LLMEngine on SCRIPT: what breaks ends those whose fault it is, and nobody ever waits for nothing."""

import gc
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from support.events import WAIT_S, Recorder, ask, assert_lawful, up
from support.scripted_model import (
    AHEAD,
    ENDLESS,
    HELLO,
    LONG,
    PACKED,
    Gate,
    ModelScript,
    assert_rested,
    running,
    scripted_engine,
)

from mini_infer.engines import detokenizer, life_cycle
from mini_infer.engines.api import (
    Delta,
    EngineState,
    Failed,
    Finished,
    FinishReason,
    Request,
    Sampling,
    Started,
    StateChanged,
    StopConditions,
)
from mini_infer.engines.errors import Draining, EngineFailed, LoadError, NoReadyEngine, OutOfMemory, StreamFailed
from mini_infer.engines.streamer import TokenStreamer

KINDS = pytest.mark.parametrize("kind", [PACKED, AHEAD])
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def answers(number, **script):
    """Scripts with an answer of their own for each of some prompts: "0" is answered "aaa…", "1" is "bbb…"."""
    return {f"{i}": ModelScript(ids=LETTERS[i].encode() * 12, **script) for i in range(number)}


def assert_canary(engine, recorder, key="canary"):
    """A fixed request answers as ever, and nothing is left over."""
    ask(engine, key, "canary")
    assert isinstance(recorder.wait_end(key), Finished)
    assert recorder.text(key) == "Hello"
    assert engine.state is EngineState.READY
    assert_rested(engine)


def threads_of(engine):
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(engine.engine_id)]


# --- memory runs short (M7) ---


@KINDS
def test_where_memory_does_for_few_rows_the_same_answers_come_in_smaller_steps(kind):
    scripts = {None: HELLO, **answers(9)}
    with running(scripts, kind=kind) as (engine, model, recorder):
        model.max_rows = 4
        for prompt in answers(9):
            ask(engine, prompt, prompt)
        for i, prompt in enumerate(answers(9)):
            assert recorder.wait_end(prompt).reason is FinishReason.EOS
            assert recorder.text(prompt) == LETTERS[i] * 12
            assert_lawful(recorder, prompt)
        assert 4 < max(len(parts) for parts in model.forwards) <= 9, "the whole is tried first"
        assert_canary(engine, recorder)


@KINDS
@pytest.mark.parametrize("max_rows", [2, 1000])
@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [("v" * 60, 5), ("v" * 64, 1), ("v" * 65, 0), ("v" * 100, 0)],
    ids=["decoding", "first decode", "prefill", "a chunk"],
)
def test_a_stream_too_long_for_the_memory_fails_alone(prompt, num_tokens, max_rows, kind):
    scripts = {None: HELLO, prompt: ENDLESS, **answers(5)}
    with running(scripts, kind=kind, prefill_tokens=16) as (engine, model, recorder):
        model.max_length, model.max_rows = 64, max_rows
        for key in ("0", "1", "long", "2", "3", "4"):
            ask(engine, key, prompt if key == "long" else key, stop=LONG)
        failed = recorder.wait_end("long")
        assert type(failed.error) is OutOfMemory
        assert failed.times.num_tokens == recorder.num_tokens("long") == num_tokens
        assert recorder.text("long") == "abc abc"[:num_tokens]
        assert_lawful(recorder, "long")
        for i, key in enumerate(answers(5)):
            recorder.wait_end(key)
            assert recorder.text(key) == LETTERS[i] * 12
            assert_lawful(recorder, key)
        assert_canary(engine, recorder)


# --- a step breaks ---


@KINDS
@pytest.mark.parametrize("fail_at", [-8, 1, 2, 4], ids=["a chunk", "prefill", "first decode", "decode"])
def test_a_row_that_breaks_a_step_ends_its_stream_and_the_engine_proves_itself(fail_at, kind, caplog):
    prompt = "v" * 21
    scripts = {None: HELLO, prompt: ModelScript(ids=b"xyz" * 9, fail_at=fail_at), **answers(4)}
    with running(scripts, kind=kind, prefill_tokens=12) as (engine, model, recorder):
        warm = len(model.forwards)
        for key in ("bad", "0", "1", "2", "3"):
            ask(engine, key, prompt if key == "bad" else key, stop=LONG)
        failed = recorder.wait_end("bad")
        assert type(failed.error) is EngineFailed
        assert "scripted failure" in failed.error.message
        assert recorder.text("bad") == "xyz"[: max(0, fail_at - 1)]
        assert failed.times.num_tokens == max(0, fail_at - 1)
        assert_lawful(recorder, "bad")
        for i, key in enumerate(answers(4)):
            assert recorder.wait_end(key).reason is FinishReason.EOS
            assert recorder.text(key) == LETTERS[i] * 12
            assert_lawful(recorder, key)
        tried_out = [parts for parts in model.forwards[warm:] if parts[0].prompt == (0,)]
        alone = [
            parts for parts in model.forwards if [(p.prompt, p.step) for p in parts] == [(tuple(b"v" * 21), fail_at)]
        ]
        assert len(tried_out) >= 2
        assert len(alone) == 1
        assert "streams broke" in caplog.text
        assert all(e.state is not EngineState.FAILED for e in recorder.events() if isinstance(e, StateChanged))
        assert_canary(engine, recorder)


@KINDS
def test_several_rows_that_break_the_same_steps_end_alone(kind):
    rng = random.Random(3)
    scripts = {None: HELLO}
    for i in range(12):
        scripts[f"{i}"] = ModelScript(ids=LETTERS[i].encode() * 12, fail_at=5 if i % 3 == 0 else None)
    with running(scripts, kind=kind) as (engine, _, recorder):
        keys = sorted((f"{i}" for i in range(12)), key=lambda _: rng.random())
        for key in keys:
            ask(engine, key, key)
        for key in keys:
            end = recorder.wait_end(key)
            assert isinstance(end, Failed if int(key) % 3 == 0 else Finished)
            assert recorder.text(key) == LETTERS[int(key)] * (4 if int(key) % 3 == 0 else 12)
            assert_lawful(recorder, key)
        assert_canary(engine, recorder)


@KINDS
@pytest.mark.parametrize("where", ["launch", "wait"])
def test_where_every_later_forward_fails_the_engine_is_failed_soon(where, kind):
    scripts = {None: HELLO, **answers(3)}
    with running(scripts, kind=kind, max_running=3) as (engine, model, recorder):
        gate = model.gate = Gate(5)
        for key in answers(3):
            ask(engine, key, key, stop=LONG)
        ask(engine, "waiting", "0")
        gate.wait_arrived(6)
        begin = time.monotonic()
        error = RuntimeError("CUDA error: device-side assert triggered")
        if where == "launch":
            model.broken = error
        else:
            engine.wait_error = error
        gate.open()
        for key in ("0", "1", "2", "waiting"):
            assert type(recorder.wait_end(key).error) is EngineFailed
            assert_lawful(recorder, key)
        changed = recorder.wait_state(EngineState.FAILED)
        assert time.monotonic() - begin < 2
        assert "device-side assert" in changed.error.message
        assert engine.state is EngineState.FAILED
        assert engine.stats().num_running == 0
        for i, key in enumerate(answers(3)):
            assert set(recorder.text(key)) <= {LETTERS[i]}
        ask(engine, "late")
        assert type(recorder.ends("late")[0].error) is EngineFailed
        wait_until(lambda: not threads_of(engine)[1:])  # the owner's rests; that of the text is joined
        engine.close()
        assert not threads_of(engine)


@KINDS
@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("fail_at", [1, 3])
def test_an_interrupt_in_a_step_ends_the_engine_and_leaves_nobody_waiting(fail_at, error, kind):
    scripts = {None: HELLO, "bad": ModelScript(ids=b"abc", fail_at=fail_at, error=error), "other": ENDLESS}
    with running(scripts, kind=kind, max_running=2) as (engine, _, recorder):
        for key, prompt in (("other", "other"), ("bad", "bad"), ("waiting", "other")):
            ask(engine, key, prompt, stop=LONG)
        for key in ("other", "bad", "waiting"):
            assert type(recorder.wait_end(key).error) is EngineFailed
            assert_lawful(recorder, key)
        steps_lost = (0, 1) if kind == AHEAD else (0,)  # the one that was under way
        assert recorder.text("bad") in {"ab"[: max(0, fail_at - 1 - lost)] for lost in steps_lost}
        assert engine.state is EngineState.FAILED


# --- logits that are no numbers (P3) ---


@KINDS
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1e-30), Sampling(temperature=1.0, top_p=1e-9)])
@pytest.mark.parametrize("nan_at", [1, 4])
def test_a_row_of_nan_fails_its_stream_alone(nan_at, sampling, kind):
    scripts = {None: HELLO, "bad": ModelScript(ids=b"xyzxyz", nan_at=nan_at), **answers(3)}
    with running(scripts, kind=kind) as (engine, _, recorder):
        for key in ("0", "bad", "1", "2"):
            ask(engine, key, key, sampling=sampling)
        failed = recorder.wait_end("bad")
        assert type(failed.error) is StreamFailed
        assert recorder.text("bad") == "xyz"[: nan_at - 1]
        assert failed.times.num_tokens == nan_at - 1
        assert_lawful(recorder, "bad")
        for i, key in enumerate(answers(3)):
            assert recorder.wait_end(key).reason is FinishReason.EOS
            assert recorder.text(key) == LETTERS[i] * 12
        assert_canary(engine, recorder)


@KINDS
def test_extreme_values_of_sampling_hurt_nobody(kind):
    """The model's own logits, so that every row of the step that these share has something to lose."""
    extreme = [
        Sampling(temperature=1e-4),
        Sampling(temperature=1e-30),
        Sampling(temperature=100.0),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=100.0, top_k=1),
        Sampling(repetition_penalty=100.0, logit_bias={5: -100.0}),
        Sampling(repetition_penalty=1e-6, presence_penalty=2.0, frequency_penalty=-2.0),
    ]
    stop = StopConditions(max_new_tokens=24, ignore_eos=True)
    with running({None: ModelScript(raw=True)}, kind=kind) as (engine, _, recorder):
        ask(engine, "alone", "Tell me", stop=stop)
        recorder.wait_end("alone")
        ask(engine, "greedy", "Tell me", stop=stop)
        for i, sampling in enumerate(extreme):
            ask(engine, f"{i}", "Tell me", stop=stop, sampling=sampling)
        for i in range(len(extreme)):
            assert recorder.wait_end(f"{i}").usage.completion_tokens == 24
        recorder.wait_end("greedy")
        assert recorder.ids("greedy") == recorder.ids("alone")
        for near_greedy in (0, 1, 3, 4, 5):
            assert recorder.ids(f"{near_greedy}") == recorder.ids("alone")
        assert_rested(engine)


@KINDS
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_keys_and_values_that_are_no_numbers_are_seen_by_nobody_else(prefix_cache, kind):
    """A token whose embedding is no number spoils its own stream; neither neighbours nor who gets its blocks."""
    poison, fine = (*b"shared beginning ", 500, *b"tail"), tuple(b"shared beginning of another")
    options = {"kind": kind, "cache_tokens": 128, "max_running": 3, "prefix_cache": prefix_cache, "prefill_tokens": 8}
    stop = StopConditions(max_new_tokens=40, ignore_eos=True)
    with running({None: ModelScript(raw=True)}, **options) as (engine, model, recorder):
        ask(engine, "clean", fine, stop=stop)
        recorder.wait_end("clean")
        with torch.no_grad():
            model.get_input_embeddings().weight[500] = float("nan")
        for turn in range(6):
            ask(engine, f"bad{turn}", poison, stop=stop)
            ask(engine, f"good{turn}", fine, stop=stop)
        for turn in range(6):
            assert type(recorder.wait_end(f"bad{turn}").error) is StreamFailed
            assert recorder.num_tokens(f"bad{turn}") == 0
            recorder.wait_end(f"good{turn}")
            assert recorder.ids(f"good{turn}") == recorder.ids("clean")
        assert_rested(engine)


# --- the text side breaks ---


@KINDS
@pytest.mark.parametrize("breaks", ["__init__", "push_choice", "finish", "fail"])
def test_a_tokenizer_that_raises_ends_its_stream_alone(breaks, kind, monkeypatch):
    class Breaking(TokenStreamer):
        pass

    def raising(self, *args, **options):
        if breaks == "__init__" and options["request"].key != "bad":
            return TokenStreamer.__init__(self, *args, **options)
        if breaks in ("finish", "fail"):
            getattr(TokenStreamer, breaks)(self, *args, **options)  # the end is out, and then it breaks
        if breaks == "__init__" or self.answer._request.key == "bad":
            raise KeyError("no such token")
        return getattr(TokenStreamer, breaks)(self, *args, **options)

    setattr(Breaking, breaks, raising)
    monkeypatch.setattr(detokenizer, "TokenStreamer", Breaking)
    with running({None: HELLO, "long": ENDLESS}, kind=kind) as (engine, _, recorder):
        ask(engine, "good")
        ask(engine, "bad", "long", stop=LONG)
        if breaks == "finish":
            recorder.wait_tokens("bad", 1)
            engine.cancel("bad")
        elif breaks == "fail":
            recorder.wait_tokens("bad", 1)
            sequence = engine.scheduler.get("bad")
            object.__setattr__(sequence.request, "deadline_ns", 1)
        end = recorder.wait_end("bad")
        assert isinstance(end, Finished) if breaks == "finish" else isinstance(end, Failed)
        recorder.wait_end("good")
        assert recorder.text("good") == "Hello"
        assert_lawful(recorder, "bad")
        assert_canary(engine, recorder)


@KINDS
@pytest.mark.parametrize("at", [Started, Delta, Finished])
@pytest.mark.parametrize("error", [ValueError("the reader is gone"), SystemExit("the reader is gone")])
def test_an_emit_that_raises_ends_the_engine_and_every_stream_is_owed_an_end(at, error, kind):
    engine, _ = scripted_engine({None: HELLO, "long": ENDLESS}, kind=kind, max_running=3)
    recorder, raised = Recorder(), threading.Event()

    def emit(events):
        if any(isinstance(e, at) and e.key == "a" for e in events) and not raised.is_set():
            raised.set()
            raise error
        recorder(events)

    engine.start(emit)
    recorder.wait_state(EngineState.READY)
    keys = ["a", "b", "c", "waiting", "waiting too"]
    for key in keys:
        try:
            ask(engine, key, "a" if key == "a" else "long", stop=LONG)
        except NoReadyEngine:  # it has failed already
            keys = keys[: keys.index(key)]
            break
    for key in keys:
        assert isinstance(recorder.wait_end(key), Failed)
        assert len(recorder.ends(key)) == 1
        assert isinstance(recorder.events(key)[-1], Failed)
    assert "the reader is gone" in recorder.wait_end("a").error.message
    assert engine.state is EngineState.FAILED
    engine.close()
    assert not threads_of(engine)


@KINDS
def test_an_emit_that_never_works_again_leaves_nothing_hanging(kind):
    engine, _ = scripted_engine({None: ENDLESS}, kind=kind, max_running=2)
    recorder, is_gone = Recorder(), threading.Event()

    def emit(events):
        recorder(events)
        if is_gone.is_set():
            raise ValueError("nobody")

    engine.start(emit)
    recorder.wait_state(EngineState.READY)
    for key in ("a", "b", "waiting"):
        ask(engine, key, stop=LONG)
    recorder.wait_tokens("b", 2)
    is_gone.set()
    recorder.wait_state(EngineState.FAILED)
    for key in ("a", "b", "waiting"):
        recorder.wait_end(key)  # it was tried
    engine.close()
    assert not threads_of(engine)


# --- a request that was made for another engine ---


@KINDS
def test_a_stream_that_the_cache_can_never_hold_fails_alone(kind):
    """Requests are prepared by one engine of a model, and another one with less memory may get them."""
    with (
        running(HELLO, kind=kind) as (large, _, _),
        running(HELLO, kind=kind, cache_tokens=32) as (engine, _, recorder),
    ):
        request = large.text.prepare(Request(key="long", prompt="x" * 30, stop=StopConditions(max_new_tokens=30)))
        ask(engine, "good")
        engine.submit(request)
        end = recorder.wait_end("long")
        assert type(end.error) is OutOfMemory
        assert "than the cache holds" in end.error.message
        assert_lawful(recorder, "long")
        recorder.wait_end("good")
        assert_canary(engine, recorder)


# --- a storm ---


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_in_a_storm_of_faults_every_stream_has_the_end_that_it_deserves(seed, kind):
    """Many streams, few blocks, and among them all kinds of faults at random places."""
    rng = random.Random(seed)
    scripts, expected = {None: HELLO}, {}
    for i in range(40):
        prompt = f"{i} " + "p" * rng.randint(0, 50)
        text = "".join(rng.choices(LETTERS, k=rng.randint(3, 30)))
        fault, at = rng.choice(["none", "none", "none", "break", "memory", "nan", "limit"]), rng.randint(1, len(text))
        script = {"ids": text.encode()}
        if fault in ("break", "memory"):
            script |= {"fail_at": at, "error": MemoryError() if fault == "memory" else None}
        elif fault == "nan":
            script |= {"nan_at": at}
        scripts[prompt] = ModelScript(**script)
        error = {"break": EngineFailed, "memory": OutOfMemory, "nan": StreamFailed}.get(fault)
        max_new_tokens = at if fault == "limit" else 60
        length = at - 1 if error else min(len(text), max_new_tokens)
        expected[f"{i}"] = (prompt, max_new_tokens, error, text[:length])
    options = {"kind": kind, "cache_tokens": 120, "max_running": 6, "prefill_tokens": 16}
    with running(scripts, **options) as (engine, model, recorder):
        model.max_rows = 4
        for key, (prompt, max_new_tokens, _, _) in expected.items():
            ask(engine, key, prompt, stop=StopConditions(max_new_tokens=max_new_tokens))
        for key, (_, _, error, text) in expected.items():
            end = recorder.wait_end(key)
            assert (type(end.error) if isinstance(end, Failed) else None) is error
            assert recorder.text(key) == text
            assert_lawful(recorder, key)
        assert_canary(engine, recorder)


# --- coming up and closing ---


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


@KINDS
@pytest.mark.parametrize("error", [LoadError("no such folder"), ValueError("odd file"), SystemExit(2)])
def test_a_failed_load_is_a_load_error(error, kind):
    engine, _ = scripted_engine(HELLO, kind=kind, load_error=error)
    recorder = Recorder()
    engine.start(recorder)
    changed = recorder.wait_state(EngineState.FAILED)
    assert str(error) in changed.error.message
    assert isinstance(changed.error, EngineFailed if isinstance(error, SystemExit) else LoadError)
    with pytest.raises(NoReadyEngine):
        _ = engine.text
    engine.close()
    assert not threads_of(engine)


@KINDS
@pytest.mark.parametrize("script", [ModelScript(fail_at=1), ModelScript(fail_at=2), ModelScript(nan_at=2)])
def test_a_model_that_cannot_make_a_token_never_gets_ready(script, kind):
    engine, _ = scripted_engine(script, kind=kind)
    recorder = Recorder()
    engine.start(recorder)
    assert isinstance(recorder.wait_state(EngineState.FAILED).error, LoadError)
    engine.close()
    states = [e.state for e in recorder.events() if isinstance(e, StateChanged)]
    assert states == [EngineState.LOADING, EngineState.WARMING_UP, EngineState.FAILED]
    assert not threads_of(engine)


def test_a_cache_larger_than_the_memory_is_a_load_error():
    engine, _ = scripted_engine(HELLO, kind=PACKED, cache_tokens=10**14)
    recorder = Recorder()
    engine.start(recorder)
    assert isinstance(recorder.wait_state(EngineState.FAILED).error, LoadError)
    engine.close()


@KINDS
def test_start_twice_is_refused_and_streams_too_early(kind):
    gate = threading.Event()
    engine, _ = scripted_engine(HELLO, kind=kind, load_gate=gate)
    recorder = Recorder()
    engine.start(recorder)
    with pytest.raises(RuntimeError):
        engine.start(Recorder())
    with running(HELLO, kind=kind) as (other, _, _):
        engine.submit(other.text.prepare(Request(key="early", prompt="x")))
    assert isinstance(recorder.wait_end("early").error, NoReadyEngine)
    gate.set()
    recorder.wait_state(EngineState.READY)
    engine.close()


@KINDS
def test_close_before_start(kind):
    engine, _ = scripted_engine(HELLO, kind=kind)
    engine.close()
    engine.close()
    assert not threads_of(engine)


@KINDS
def test_close_while_it_loads(kind, monkeypatch):
    monkeypatch.setattr(life_cycle, "CLOSE_LOADING_TIMEOUT_S", 0.05)
    gate = threading.Event()
    engine, _ = scripted_engine(HELLO, kind=kind, load_gate=gate)
    recorder = Recorder()
    engine.start(recorder)
    recorder.wait_state(EngineState.LOADING)
    engine.close()
    engine.close()
    gate.set()
    recorder.wait_state(EngineState.DRAINING)
    assert [event.state for event in recorder.events()] == [EngineState.LOADING, EngineState.DRAINING]
    wait_until(lambda: not threads_of(engine))


@KINDS
def test_close_while_it_warms_up(kind):
    gate = Gate()
    engine, _ = scripted_engine({None: ModelScript(ids=b"Hello", gate=gate)}, kind=kind)
    recorder = Recorder()
    engine.start(recorder)
    gate.wait_arrived(1)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert engine._closing.wait(WAIT_S)
    gate.open()
    closing.join(WAIT_S)
    assert engine.state is EngineState.DRAINING
    assert not threads_of(engine)


@KINDS
def test_close_while_it_rests(kind):
    engine, _ = scripted_engine(HELLO, kind=kind)
    recorder = up(engine)
    ask(engine, "a")
    recorder.wait_end("a")
    engine.close()
    engine.close()
    assert not threads_of(engine)
    recorder.wait_state(EngineState.DRAINING)
    with running(HELLO, kind=kind) as (other, _, _):
        engine.submit(other.text.prepare(Request(key="late", prompt="x")))
    assert isinstance(recorder.ends("late")[0].error, Draining)


@KINDS
@pytest.mark.parametrize("num_steps", [0, 1, 3, 9], ids=["prefill", "a later chunk", "decoding", "full of tokens"])
def test_close_in_mid_stream(num_steps, kind):
    scripts = {None: HELLO, "v" * 30: ENDLESS}
    engine, model = scripted_engine(scripts, kind=kind, max_running=2, prefill_tokens=12)
    recorder = up(engine)
    gate = model.gate = Gate(num_steps)
    for key in ("one", "two", "waiting"):
        ask(engine, key, "v" * 30, stop=LONG)
    gate.wait_arrived(num_steps + 1)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert engine._closing.wait(WAIT_S)
    gate.open()
    closing.join(WAIT_S)
    for key in ("one", "two", "waiting"):
        assert type(recorder.ends(key)[0].error) is Draining
        assert_lawful(recorder, key)
        assert "abc abc abc".startswith(recorder.text(key))
    assert recorder.ends("one")[0].times.num_tokens == recorder.num_tokens("one")
    assert not threads_of(engine)


@KINDS
def test_close_while_a_step_hangs(kind, monkeypatch):
    monkeypatch.setattr(life_cycle, "CLOSE_TIMEOUT_S", 0.1)
    engine, model = scripted_engine({None: ENDLESS}, kind=kind, max_running=2)
    recorder = up(engine)
    gate = model.gate = Gate(4)
    for key in ("one", "two", "waiting"):
        ask(engine, key, stop=LONG)
    gate.wait_arrived(5)
    engine.close()
    for key in ("one", "two", "waiting"):
        assert type(recorder.ends(key)[0].error) is Draining
    gate.open()  # what the threads still say is dropped
    wait_until(lambda: not threads_of(engine))
    for key in ("one", "two", "waiting"):
        assert_lawful(recorder, key)
    engine.close()


FORGETFUL = """
import sys
sys.path.insert(0, "tests")
import torch
torch.set_num_threads(1)
from support.events import ask, up
from support.scripted_model import ENDLESS, LONG, scripted_engine
engine, _ = scripted_engine(ENDLESS, kind=sys.argv[1])
recorder = up(engine)
for i in range(int(sys.argv[2])):
    ask(engine, f"{i}", stop=LONG)
    recorder.wait_tokens(f"{i}", 1)
print("over", flush=True)
"""


@pytest.mark.parametrize("num_streams", [0, 2])
def test_a_process_whose_owner_forgot_to_close_exits(num_streams):
    command = [sys.executable, "-c", FORGETFUL, AHEAD, f"{num_streams}"]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


class Kept:
    """What must be gone when an engine is over: its model, its cache and its tables."""

    def __init__(self, engine, model):
        runner = engine._parts.runner
        parts = [model, runner, runner._tables, engine._parts.scheduler]
        parts += [module._mini_infer._keys for module in model.modules() if hasattr(module, "_mini_infer")]
        self.alive = [weakref.ref(part) for part in parts]
        assert len(self.alive) == 4 + 2

    def check(self):
        gc.collect()
        assert [type(part()) for part in self.alive if part() is not None] == []


@KINDS
def test_close_frees_model_and_cache(kind, caplog):
    caplog.set_level("CRITICAL")  # pytest keeps records, and they the frames
    engine, model = scripted_engine({None: HELLO, "long": ENDLESS, "bad": ModelScript(fail_at=1)}, kind=kind)
    recorder = up(engine)
    for key in ("Hello", "bad", "long"):
        ask(engine, key, key, stop=LONG)
    recorder.wait_tokens("long", 2)
    kept = Kept(engine, model)
    engine.close()
    engine._load_model = None
    del model
    kept.check()


@KINDS
@pytest.mark.parametrize("where", ["launch", "wait", "emit"])
def test_a_failed_engine_frees_model_and_cache(where, kind, caplog):
    caplog.set_level("CRITICAL")  # as above
    engine, model = scripted_engine({None: HELLO, "long": ENDLESS}, kind=kind)
    recorder = up(engine)
    kept = Kept(engine, model)
    ask(engine, "a", "long", stop=LONG)
    recorder.wait_tokens("a", 1)
    if where == "launch":
        model.broken = RuntimeError("CUDA error: device-side assert triggered")
    elif where == "wait":
        engine.wait_error = RuntimeError("CUDA error: device-side assert triggered")
    else:
        recorder.batches = None  # raises when the next events come
    wait_until(lambda: engine.state is EngineState.FAILED)
    engine._executor.submit(int).result()
    engine._load_model = engine.wait_error = model.broken = None
    del model
    kept.check()
    engine.close()


@KINDS
def test_a_load_that_fails_late_frees_the_model(kind, caplog):
    caplog.set_level("CRITICAL")
    engine, model = scripted_engine(ModelScript(fail_at=2), kind=kind)
    recorder = Recorder()
    engine.start(recorder)
    recorder.wait_state(EngineState.FAILED)
    alive = weakref.ref(model)
    engine._executor.submit(int).result()
    engine._load_model = None
    del model
    gc.collect()
    assert alive() is None, "though the error that says why is kept"
    engine.close()
