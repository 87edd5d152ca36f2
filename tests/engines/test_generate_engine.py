"""GenerateEngine on SCRIPT: text, ends, cancelling, deadlines, faults, stamps."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from support import tokenizers
from support.events import Recorder, ask, assert_lawful, up
from support.scripted_model import END_OF_TURN, EOS, HELLO, LONG, NO_TEXT, Gate, ModelScript, running, scripted_engine

from mini_infer.engines import generate_engine
from mini_infer.engines.api import (
    EngineKind,
    Failed,
    Finished,
    FinishReason,
    OutputOptions,
    Sampling,
    StopConditions,
)
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.generate_engine import GenerateEngine

TEXT = OutputOptions()


def answer(script, prompt="hi", tokenizer=tokenizers.byte_level, **wishes) -> tuple[Recorder, Finished | Failed]:
    with running(script, tokenizer=tokenizer) as (engine, _, recorder):
        ask(engine, "a", prompt, **wishes)
        end = recorder.wait_end("a")
        assert_lawful(recorder, "a")
        return recorder, end


def soon_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


# --- what it is ---


def test_it_says_what_it_is():
    engine, _ = scripted_engine(HELLO, engine_id="model/3")
    assert (engine.engine_id, engine.kind, engine.devices, engine.max_running) == (
        "model/3",
        EngineKind.GENERATE,
        ("cpu",),
        1,
    )
    assert GenerateEngine(EngineConfig(device="cuda"), "x").devices == ("cuda:0",)
    engine.close()


def test_model_is_built_warmed_and_run_on_its_own_thread():
    threads = []

    engine, model = scripted_engine(HELLO, engine_id="mine/0")
    load, misbehave = engine._load_model, model._misbehave
    engine._load_model = lambda config: (threads.append(threading.current_thread().name), load(config))[1]
    model._misbehave = lambda *a: (threads.append(threading.current_thread().name), misbehave(*a))[1]
    recorder = up(engine)
    num_warm = len(threads)
    assert num_warm == 3  # the load and two real tokens
    ask(engine, "a")
    recorder.wait_end("a")
    engine.close()
    assert len(threads) > num_warm
    assert {name.rpartition("_")[0] for name in threads} == {"mine/0"}


def test_the_thread_sets_its_device_before_anything_is_built_there(monkeypatch):
    device, done = torch.device("cuda", 1), []
    monkeypatch.setattr(generate_engine, "resolve_device", lambda label: device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append((threading.get_ident(), device)))
    engine, _ = scripted_engine(HELLO)
    load = engine._load_model
    engine._load_model = lambda config: (done.append((threading.get_ident(), "load")), load(config))[1]
    up(engine)
    engine.close()
    thread = done[0][0]
    assert done == [(thread, device), (thread, "load")]
    assert thread != threading.get_ident()


# --- text (S2, S5, S6, L5) ---


@pytest.mark.floor
@pytest.mark.parametrize("zoo", ["sentencepiece_like", "byte_level_bpe", "slow_sentencepiece"])
@pytest.mark.parametrize(
    "text", ["Dear Sam, I hope.\n    indented", "done   , right ?  yes .\n\n  x", "大語言 ภาษา 😀!"]
)
def test_streamed_text_equals_the_decoding_of_all_ids(zoo, text):
    codec = tokenizers.ZOO[zoo]()
    ids = codec.encode(text, add_special_tokens=False)
    recorder, end = answer(ModelScript(ids=ids), tokenizer=tokenizers.ZOO[zoo])
    assert recorder.ids("a")[:-1] == ids
    assert recorder.text("a") == codec.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert end.usage.completion_tokens == len(ids) + 1


@pytest.mark.parametrize("end_id", [EOS, END_OF_TURN])
def test_every_end_token_of_the_model_ends_the_answer_and_stays_out_of_the_text(end_id):
    script = ModelScript(ids=[*b"abc", end_id, *b"never"])
    recorder, end = answer(script)
    assert recorder.text("a") == "abc"
    assert (end.reason, end.matched, end.usage.completion_tokens) == (FinishReason.EOS, end_id, 4)
    recorder, _ = answer(script, output=OutputOptions(skip_special_tokens=False))
    assert recorder.text("a").startswith("abc<|")


@pytest.mark.floor
@pytest.mark.parametrize("num", [1, 2, 7])
def test_ignore_eos_runs_to_exactly_max_new_tokens_and_no_forward_further(num):
    script = ModelScript(ids=[END_OF_TURN, *b"ab"])
    with running(script) as (engine, model, recorder):
        before = model.num_forwards
        ask(engine, "a", stop=StopConditions(ignore_eos=True, max_new_tokens=num))
        end = recorder.wait_end("a")
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.MAX_NEW_TOKENS, num)
        assert model.num_forwards - before == num


@pytest.mark.floor
@pytest.mark.parametrize(
    ("stop", "text", "reason", "num_tokens"),
    [
        (StopConditions(), "Hello", FinishReason.EOS, 6),
        (StopConditions(strings=("ll",)), "He", FinishReason.STOP_STRING, 4),
        (StopConditions(token_ids=(ord("l"),)), "He", FinishReason.STOP_TOKEN, 3),
        (StopConditions(max_new_tokens=2), "He", FinishReason.MAX_NEW_TOKENS, 2),
    ],
)
def test_each_reason_takes_one_forward_for_each_token(stop, text, reason, num_tokens):
    with running() as (engine, model, recorder):
        before = model.num_forwards
        ask(engine, "a", stop=stop)
        end = recorder.wait_end("a")
        assert (recorder.text("a"), end.reason) == (text, reason)
        assert end.usage.completion_tokens == model.num_forwards - before == num_tokens


def test_min_new_tokens_holds_back_the_end():
    _, end = answer(ModelScript(ids=[EOS]), stop=StopConditions(min_new_tokens=5))
    assert end.reason is FinishReason.EOS
    assert end.usage.completion_tokens == 6


@pytest.mark.parametrize("text", ["x" * 60, "こんにちは" * 4, "ภาษาไทยไม่มีช่องว่าง", "안녕하세요" * 4])
def test_text_without_spaces_is_not_held_back(text):
    gate = Gate()
    with running({"hi": ModelScript(ids=list(text.encode()), gate=gate)}) as (engine, _, recorder):
        ask(engine, "a", "hi", output=TEXT)
        gate.let(4)
        gate.wait_arrived(5)
        assert recorder.text("a"), "nothing after four bytes"
        gate.open()
        recorder.wait_end("a")
        assert len([d for d in recorder.deltas("a") if d.text]) == len(text)
        assert recorder.text("a") == text


def test_a_stream_without_text_has_no_first_text():
    recorder, end = answer(ModelScript(ids=[EOS]), output=TEXT)
    assert end.times.first_token_ns is not None
    assert end.times.first_text_ns is None
    assert not recorder.deltas("a")


def test_an_id_that_the_tokenizer_does_not_have_is_no_text_and_no_failure():
    recorder, end = answer(ModelScript(ids=[*b"ab", NO_TEXT, *b"cd"]))
    assert recorder.text("a") == "abcd"
    assert end.usage.completion_tokens == 6


def test_the_context_ends_an_answer():
    with running(ModelScript(ids=list(b"x") * 300)) as (engine, _, recorder):
        ask(engine, "a", "y" * 250)
        end = recorder.wait_end("a")
        assert (end.reason, end.usage.completion_tokens) == (FinishReason.CONTEXT_LENGTH, 6)


# --- log-probabilities (P8) ---


def test_logprobs_have_one_entry_for_each_token_also_where_a_stop_string_cuts():
    output = OutputOptions(logprobs=True, top_logprobs=4)
    recorder, end = answer(HELLO, output=output, stop=StopConditions(strings=("llo",)))
    entries = [entry for delta in recorder.deltas("a") for entry in delta.logprobs]
    assert recorder.text("a") == "He"
    assert len(entries) == end.usage.completion_tokens == 5
    assert b"".join(entry.token for entry in entries) == b"Hello"
    assert all(entry.logprob <= 0 and len(entry.top) == 4 for entry in entries)
    assert [entry.token_id for entry in entries] == recorder.ids("a")


def test_the_chosen_token_has_its_own_logprob_outside_the_top():
    output = OutputOptions(logprobs=True, top_logprobs=1)
    recorder, _ = answer(HELLO, output=output, sampling=Sampling(logit_bias={ord("z"): 100.0}), stop=LONG)
    entry = recorder.deltas("a")[0].logprobs[0]
    assert entry.token_id == ord("z")
    assert entry.top[0].token_id == ord("H")
    assert entry.logprob < -30


# --- sampling (P3, P4) ---


def test_flat_logits_give_many_different_ids_where_top_k_is_not_set():
    script = ModelScript(flat=True)
    wishes = {"sampling": Sampling(temperature=1.0, seed=3), "stop": replace(LONG, ignore_eos=True)}
    recorder, _ = answer(script, **wishes)
    assert len(set(recorder.ids("a"))) > 100


@pytest.mark.parametrize(
    "sharp",
    [
        Sampling(temperature=2.0, top_k=1),
        Sampling(temperature=2.0, top_p=1e-6),
        Sampling(temperature=2.0, min_p=1.0),
        Sampling(temperature=1e-30),
    ],
)
def test_sharp_sampling_equals_greedy(sharp):
    with running(ModelScript(raw=True)) as (engine, _, recorder):
        stop = StopConditions(max_new_tokens=20, ignore_eos=True)
        ask(engine, "greedy", stop=stop)
        ask(engine, "sharp", stop=stop, sampling=sharp)
        recorder.wait_end("sharp")
        assert recorder.ids("sharp") == recorder.ids("greedy")


def test_each_field_of_sampling_has_an_effect():
    flat = ModelScript(flat=True)
    stop = StopConditions(max_new_tokens=30, ignore_eos=True)

    def ids(script=flat, **sampling):
        return answer(script, stop=stop, sampling=Sampling(**{"seed": 1, "temperature": 1.0, **sampling}))[0].ids("a")

    plain = ids()
    assert plain == ids()
    assert ids(seed=2) != plain
    assert len(set(ids(top_k=1))) == 1
    assert len(set(ids(top_p=1e-6))) == 1
    assert len(set(ids(temperature=0.0))) == 1
    assert set(ids(logit_bias={5: 100.0})) == {5}
    assert len(set(ids(temperature=0.0, presence_penalty=1.0))) == 30
    assert len(set(ids(temperature=0.0, frequency_penalty=1.0))) == 30
    raw = ModelScript(raw=True)
    assert ids(raw, temperature=0.0, repetition_penalty=5.0) != ids(raw, temperature=0.0)
    assert ids(raw, min_p=0.999) != ids(raw, min_p=0.0, temperature=5.0)


def test_two_engines_in_two_threads_do_not_disturb_each_others_draws():
    wishes = {
        "sampling": Sampling(temperature=1.5, seed=11),
        "stop": StopConditions(max_new_tokens=40, ignore_eos=True),
    }
    alone = answer(ModelScript(flat=True), **wishes)[0].ids("a")
    with running(ModelScript(flat=True)) as (one, _, first), running(ModelScript(flat=True)) as (two, _, second):
        for i in range(3):
            ask(one, f"{i}", "hi", **wishes)
            ask(two, f"{i}", "other", **{**wishes, "sampling": Sampling(temperature=1.5, seed=12)})
        for i in range(3):
            first.wait_end(f"{i}")
            second.wait_end(f"{i}")
            assert first.ids(f"{i}") == alone
            assert second.ids(f"{i}") == second.ids("0") != alone
