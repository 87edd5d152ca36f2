import contextlib
import subprocess
import sys
import threading

import pytest
from support.events import Recorder, ask, assert_lawful, up

from mini_infer.engines.api import (
    ChatMessage,
    Delta,
    EngineKind,
    Finished,
    FinishReason,
    OutputOptions,
    Request,
    Sampling,
    StopConditions,
)
from mini_infer.engines.errors import InvalidRequest, OutOfMemory, StreamFailed
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.engines.scripted_text import END, END_ID, ScriptedText


@contextlib.contextmanager
def running(scripts=None, **options):
    engine = ScriptedEngine(scripts=scripts, **options)
    try:
        yield engine, up(engine)
    finally:
        engine.close()


def answer(scripts=None, prompt="Hello", **wishes) -> tuple[Recorder, Finished]:
    with running(scripts) as (engine, recorder):
        ask(engine, "a", prompt, **wishes)
        recorder.wait_end("a")
        assert_lawful(recorder, "a")
        return recorder, recorder.ends("a")[0]


def test_it_loads_neither_torch_nor_transformers():
    code = (
        "import sys, mini_infer.engines.scripted_engine; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_script_echoes_the_prompt():
    recorder, end = answer(prompt="Hello  wonderful\n world")
    assert recorder.text("a") == "Hello  wonderful\n world"
    assert end.reason is FinishReason.EOS
    assert end.matched == END_ID
    assert end.usage.prompt_tokens == 3
    assert end.usage.completion_tokens == 4


def test_kind_and_devices_can_be_another_engines():
    engine = ScriptedEngine("m/0", kind=EngineKind.REPLICA, devices=("cuda:0",), max_running=8)
    assert (engine.engine_id, engine.kind, engine.devices, engine.max_running) == (
        "m/0",
        EngineKind.REPLICA,
        ("cuda:0",),
        8,
    )
    engine.close()


def test_a_character_in_pieces_comes_whole():
    recorder, end = answer(Script(tokens=["a", *(bytes([byte]) for byte in "😀".encode()), "b"]))
    assert [delta.text for delta in recorder.deltas("a")] == ["a", "", "", "", "😀", "b", ""]
    assert recorder.ids("a")[1:5] == list("😀".encode())
    assert end.usage.completion_tokens == 7


def test_without_token_ids_deltas_come_only_with_text():
    script = Script(tokens=["a", b"\xc3", b"\xa9"])
    recorder, end = answer(script, output=OutputOptions())
    assert [delta.text for delta in recorder.deltas("a")] == ["a", "é"]
    assert recorder.deltas("a")[1].cumulative_tokens == 3
    assert end.usage.completion_tokens == 4


def test_half_a_character_at_the_end_is_replaced():
    recorder, _ = answer(Script(tokens=["a", b"\xf0\x9f"]))
    assert recorder.text("a") == "a\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "reason", "matched"),
    [
        (StopConditions(max_new_tokens=2), "one two", FinishReason.MAX_NEW_TOKENS, None),
        (StopConditions(strings=(" tw",)), "one", FinishReason.STOP_STRING, " tw"),
        (StopConditions(strings=("o th",)), "one tw", FinishReason.STOP_STRING, "o th"),
        (StopConditions(strings=("o th",), include_stop_string=True), "one two th", FinishReason.STOP_STRING, "o th"),
        (StopConditions(strings=("three!",)), "one two three", FinishReason.EOS, END_ID),
        (StopConditions(strings=("one",), min_new_tokens=2), "one two three", FinishReason.EOS, END_ID),
        (StopConditions(ignore_eos=True, max_new_tokens=6), "one two three", FinishReason.MAX_NEW_TOKENS, None),
    ],
)
def test_reasons(stop, text, reason, matched):
    recorder, end = answer(Script(tokens=["one", " two", " three"]), stop=stop)
    assert (recorder.text("a"), end.reason, end.matched) == (text, reason, matched)
    if stop.ignore_eos:
        assert end.usage.completion_tokens == 6


def test_stop_tokens_and_end_tokens_stay_out_of_the_text():
    with running(Script(tokens=["a", "b", END, "c"])) as (engine, recorder):
        stop_id = engine.text.token_id("b")
        ask(engine, "stopped", stop=StopConditions(token_ids=(stop_id,)))
        ask(engine, "kept", stop=StopConditions(token_ids=(stop_id,), include_stop_string=True))
        ask(engine, "special", output=OutputOptions(skip_special_tokens=False))
        recorder.wait_end("special")
        assert recorder.text("stopped") == "a"
        assert recorder.ends("stopped")[0].reason is FinishReason.STOP_TOKEN
        assert recorder.ends("stopped")[0].matched == stop_id
        assert recorder.text("kept") == "ab"
        assert recorder.text("special") == "ab" + END


def test_the_context_is_a_limit_of_its_own():
    text = ScriptedText(context_length=10)
    with running(Script(tokens=["a"], repeat=True), text=text) as (engine, recorder):
        ask(engine, "a", "one two three")
        end = recorder.wait_end("a")
        assert end.reason is FinishReason.CONTEXT_LENGTH
        assert end.usage.completion_tokens == 7
        ask(engine, "b", "one two three", stop=StopConditions(max_new_tokens=7))
        assert recorder.wait_end("b").reason is FinishReason.MAX_NEW_TOKENS


def test_deltas_join_to_the_decoding_of_all_ids():
    with running() as (engine, recorder):
        ask(engine, "a", "Grüße 😀  und\n\n  ende")
        recorder.wait_end("a")
        assert recorder.text("a") == engine.text.detokenize(recorder.ids("a"))


def test_logprobs_have_one_entry_for_each_token():
    recorder, end = answer(Script(tokens=["a", b"\xc3", b"\xa9"]), output=OutputOptions(logprobs=True, top_logprobs=3))
    entries = [entry for delta in recorder.deltas("a") for entry in delta.logprobs]
    assert len(entries) == end.usage.completion_tokens
    assert b"".join(entry.token for entry in entries[:3]).decode() == "aé"
    assert {len(entry.top) for entry in entries} == {3}


def test_all_running_streams_get_one_token_in_every_step_and_one_emit():
    gate = Gate()
    with running(Script(tokens=["x "], repeat=True, gate=gate), max_running=4) as (engine, recorder):
        limit = StopConditions(max_new_tokens=5)
        for key in "abcd":
            ask(engine, key, stop=limit)
        for key in "abcd":
            recorder.wait_started(key)
        gate.allow(4)
        for key in "abcd":
            recorder.wait_tokens(key, 1)
        assert engine.num_steps == 1
        batch = [e for e in recorder.batches[-1] if isinstance(e, Delta)]
        assert [delta.key for delta in batch] == list("abcd")
        gate.open()
        for key in "abcd":
            recorder.wait_end(key)
        assert engine.num_steps == 5
        assert engine.num_prefills == 4
        assert engine.peak_running == 4
        assert engine.stats().generated_tokens == 20
        assert engine.stats().last_step_ns is not None


def test_a_gate_of_two_streams_lets_no_token_more_through_than_it_was_told():
    gate = Gate()
    with running(Script(tokens=["x "], repeat=True, gate=gate), max_running=2) as (engine, recorder):
        for key in "ab":
            ask(engine, key)
            recorder.wait_started(key)
        gate.allow(3)
        recorder.wait_for(lambda: sum(map(recorder.num_tokens, "ab")) >= 3)
    assert sum(map(recorder.num_tokens, "ab")) == engine.stats().generated_tokens == 3


def test_the_third_of_two_waits_for_a_slot():
    gates = {key: Gate() for key in "abc"}
    scripts = {key: Script(tokens=["x"], gate=gate) for key, gate in gates.items()}
    with running(scripts, max_running=2) as (engine, recorder):
        for key in "abc":
            ask(engine, key, key)
        recorder.wait_started("b")
        assert engine.stats().num_running == 2
        assert not recorder.events("c")
        gates["a"].open()
        recorder.wait_started("c")
        for gate in gates.values():
            gate.open()
        for key in "abc":
            assert isinstance(recorder.wait_end(key), Finished)
        assert engine.peak_running == 2


@pytest.mark.parametrize("error", [None, StreamFailed("NaN"), OutOfMemory("too big")])
def test_a_stream_fails_alone(error):
    scripts = {"bad": Script(tokens=["a", "b", "c"], fail_at=3, error=error), "good": Script(tokens=["x"] * 9)}
    with running(scripts, max_running=2) as (engine, recorder):
        ask(engine, "bad", "bad")
        ask(engine, "good", "good")
        failed = recorder.wait_end("bad")
        assert isinstance(failed.error, type(error) if error else StreamFailed)
        assert failed.times.num_tokens == 2
        assert recorder.text("bad") == "ab"
        assert recorder.wait_end("good").reason is FinishReason.EOS
        for key in ("bad", "good"):
            assert_lawful(recorder, key)


def test_delays_grow_their_own_span_only():
    def spans(**script):
        recorder, end = answer(Script(tokens=["a", "b"], **script))
        times = end.times
        started = recorder.wait_started("a")
        assert started.at_ns == times.admitted_ns
        first = recorder.deltas("a")[0]
        assert first.first_token_ns == times.first_token_ns
        return times.first_token_ns - times.admitted_ns, times.max_gap_ns

    prefill_ns, gap_ns = spans(prefill_s=0.3)
    assert prefill_ns >= 3e8 > gap_ns
    _, gap_ns = spans(step_s=0.3)
    assert gap_ns >= 3e8


def test_text_prepare_can_be_slow_and_the_queue_grows_by_itself():
    engine_gate = Gate()
    with running({"x": Script(gate=engine_gate), "y": Script(tokens=["y"])}) as (engine, recorder):
        ask(engine, "x", "x")
        recorder.wait_started("x")
        ask(engine, "y", "y")
        threading.Event().wait(0.1)
        engine_gate.open()
        end = recorder.wait_end("y")
        assert end.times.admitted_ns >= recorder.ends("x")[0].times.last_token_ns
        assert end.times.first_token_ns - end.times.admitted_ns < 9e7


# --- its text model ---


def prepare(text=None, **request):
    return (text or ScriptedText(context_length=10, vocab_size=1000)).prepare(Request(key="a", **request))


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        ({"prompt": ""}, "prompt", "INVALID_FIELD"),
        ({"prompt": "a " * 10}, "prompt", "PROMPT_TOO_LONG"),
        ({"prompt_token_ids": tuple(range(10))}, "prompt_token_ids.ids", "PROMPT_TOO_LONG"),
        ({"prompt_token_ids": (1000,)}, "prompt_token_ids.ids", "INVALID_FIELD"),
        ({"prompt_token_ids": ()}, "prompt_token_ids.ids", "INVALID_FIELD"),
        ({"prompt": "a", "stop": StopConditions(token_ids=(1000,))}, "stop.token_ids", "INVALID_FIELD"),
        ({"prompt": "a", "sampling": Sampling(logit_bias={1000: 1.0})}, "sampling.logit_bias", "INVALID_FIELD"),
        (
            {"prompt": "a", "stop": StopConditions(max_new_tokens=2, min_new_tokens=3)},
            "stop.min_new_tokens",
            "INVALID_FIELD",
        ),
    ],
)
def test_bad_requests_name_their_field(request_, field, reason):
    with pytest.raises(InvalidRequest) as caught:
        prepare(**request_)
    assert (caught.value.field, caught.value.reason) == (field, reason)


def test_chat_is_laid_out_or_refused():
    chat = (ChatMessage("user", "Hello there"),)
    ids = prepare(chat=chat).prompt_ids
    assert len(ids) == 4
    with pytest.raises(InvalidRequest) as caught:
        prepare(ScriptedText(has_chat_template=False), chat=chat)
    assert caught.value.field == "chat"


def test_defaults_are_filled_in_and_only_sampling_has_a_seed():
    greedy = prepare(prompt="a")
    assert greedy.sampling.temperature == 0.0
    assert greedy.sampling.seed is None
    sampled = prepare(prompt="a", sampling=Sampling(temperature=1.0))
    assert sampled.sampling.seed is not None
    assert prepare(prompt="a", sampling=Sampling(temperature=1.0, seed=7)).sampling.seed == 7


def test_characters_and_words_and_unknown_ids():
    text = ScriptedText(unit="character")
    assert len(text.tokenize("été")) == 3
    assert text.detokenize(text.tokenize("été " + "x")) == "été x"
    assert text.detokenize((5000,)) == "<5000>"
    with pytest.raises(InvalidRequest):
        text.detokenize((1 << 20,))
