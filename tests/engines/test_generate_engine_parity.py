"""The same ids and log-probabilities as the model by itself, on several architectures."""

import logging
import random

import pytest
import torch
from support.events import Recorder, ask, up
from support.models import ZOO, build_model
from support.scripted_model import loaded
from support.tokenizers import byte_level
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

from mini_infer.engines.api import EngineState, OutputOptions, Sampling, StopConditions
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError
from mini_infer.engines.generate_engine import GenerateEngine

NEW = 24
STOP = StopConditions(max_new_tokens=NEW, ignore_eos=True)
PROMPTS = [tuple(random.Random(n).choices(range(256), k=n)) for n in (1, 3, 7, 8, 9, 20, 60)]

pytestmark = pytest.mark.floor


def engine_of(model):
    ready = loaded(model, byte_level(), frozenset())
    return GenerateEngine(EngineConfig(model="tiny"), "tiny/0", load=lambda config: ready)


def plain(model, prompt, **wishes):
    ids = torch.tensor([prompt])
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **wishes)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :]


@pytest.fixture(scope="module", params=list(ZOO))
def served(request):
    model = build_model(request.param)
    engine = engine_of(model)
    yield model, engine, up(engine)
    engine.close()


def test_ids_are_those_of_plain_generate(served, caplog):
    model, engine, recorder = served
    answers = set()
    for prompt in PROMPTS:
        key = f"ids{len(prompt)}"
        with caplog.at_level(logging.WARNING):
            ask(engine, key, prompt, stop=STOP)
            recorder.wait_end(key)
        assert recorder.ids(key) == plain(model, prompt).tolist()
        answers.add(tuple(recorder.ids(key)))
    assert len(answers) == len(PROMPTS), "the answers do not depend on the prompts: the test shows nothing"
    assert not caplog.records


def test_logprobs_are_those_of_a_plain_forward(served):
    model, engine, recorder = served
    for prompt in PROMPTS[::3]:
        key = f"logprobs{len(prompt)}"
        ask(engine, key, prompt, stop=STOP, output=OutputOptions(logprobs=True, top_logprobs=5))
        recorder.wait_end(key)
        ids = recorder.ids(key)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)  # [NEW, vocab]
        entries = [entry for delta in recorder.deltas(key) for entry in delta.logprobs]
        assert len(entries) == NEW
        for row, token_id, entry in zip(expected, ids, entries, strict=True):
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [top.logprob for top in entry.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)


def test_repetition_penalty_is_that_of_plain_generate(served):
    model, engine, recorder = served
    ask(engine, "penalty", PROMPTS[3], stop=STOP, sampling=Sampling(repetition_penalty=1.7))
    recorder.wait_end("penalty")
    assert recorder.ids("penalty") == plain(model, PROMPTS[3], repetition_penalty=1.7).tolist()


def test_sampling_repeats_by_seed(served):
    _, engine, recorder = served
    for key, seed in (("one", 1), ("again", 1), ("two", 2)):
        ask(engine, f"seed {key}", PROMPTS[2], stop=STOP, sampling=Sampling(temperature=1.0, seed=seed))
        recorder.wait_end(f"seed {key}")
    assert recorder.ids("seed one") == recorder.ids("seed again") != recorder.ids("seed two")


def test_what_the_models_files_say_is_a_default_and_never_wins(tmp_path, caplog):
    model = build_model("rand")
    expected = plain(model, PROMPTS[2]).tolist()
    model.generation_config = GenerationConfig(
        max_length=12, temperature=0.6, top_k=20, do_sample=True, repetition_penalty=1.5, eos_token_id=expected[3]
    )
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    engine = GenerateEngine(EngineConfig(model=str(tmp_path), num_threads=1), "saved/0")
    recorder = up(engine)
    with caplog.at_level(logging.WARNING):
        greedy = Sampling(temperature=0.0, repetition_penalty=1.0)
        ask(engine, "explicit", PROMPTS[2], stop=STOP, sampling=greedy)
        ask(engine, "ends", PROMPTS[2], stop=StopConditions(max_new_tokens=NEW), sampling=greedy)
        ask(engine, "default", PROMPTS[2], stop=STOP)
        assert recorder.wait_end("default").seed is not None
    engine.close()
    assert recorder.ids("explicit") == expected
    assert recorder.ids("ends") == expected[:4]
    assert recorder.ends("ends")[0].matched == expected[3]
    assert not caplog.records


def test_encoder_decoder_models_are_refused():
    size = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 300}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    engine = engine_of(BartForConditionalGeneration(BartConfig(**size, **heads)))
    recorder = Recorder()
    engine.start(recorder)
    error = recorder.wait_state(EngineState.FAILED).error
    engine.close()
    assert isinstance(error, LoadError)
    assert "BartForConditionalGeneration" in error.message
