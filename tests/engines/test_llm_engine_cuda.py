"""LLMEngine on a real CUDA device, with steps launched ahead and padded; skipped where there is none."""

import copy
import dataclasses
import random

import pytest
import torch
from support.events import ask, up
from support.models import PACKABLE, build_model
from support.scripted_model import loaded
from support.tokenizers import byte_level
from transformers import GenerationConfig

from mini_infer.engines.api import Finished, OutputOptions, Sampling, StopConditions
from mini_infer.engines.assembly import Tuning
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.llm_engine import LLMEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CARD = torch.device("cuda:0")
PROMPTS = [tuple(random.Random(n).choices(range(256), k=n)) for n in (1, 3, 8, 9, 20, 33, 60)]
NEW = 20
STOP = StopConditions(max_new_tokens=NEW, ignore_eos=True)
LOGPROBS = OutputOptions(token_ids=True, logprobs=True)


def engine_of(model, **settings) -> LLMEngine:
    ready = dataclasses.replace(loaded(model, byte_level(), frozenset()), device=CARD)
    tuning = dataclasses.replace(Tuning.of(CARD), block_size=8)
    config = EngineConfig(model="tiny", device="cuda:0", prefill_tokens=24, **settings)
    return LLMEngine(config, "card/0", load=lambda _: ready, tuning=tuning)


def plain(model, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt], device=CARD)
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
            0, len(prompt) :
        ].tolist()


@pytest.mark.parametrize("name", list(PACKABLE))
def test_answers_in_company_are_the_models_own(name: str) -> None:
    model = build_model(name).to(CARD)
    own = copy.deepcopy(model)
    engine = engine_of(model, cache_tokens=200, max_running=5)
    try:
        recorder = up(engine)
        for number, prompt in enumerate(PROMPTS):
            ask(engine, str(number), prompt, stop=STOP, output=LOGPROBS)
        for number, prompt in enumerate(PROMPTS):
            assert isinstance(recorder.wait_end(str(number)), Finished)
            ids = recorder.ids(str(number))
            assert ids == plain(own, prompt)
            with torch.inference_mode():
                logits = own(torch.tensor([[*prompt, *ids]], device=CARD)).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(-1, torch.tensor(ids, device=CARD)[:, None])[:, 0].tolist()
            entries = [entry.logprob for delta in recorder.deltas(str(number)) for entry in delta.logprobs]
            assert entries == pytest.approx(expected, abs=1e-3)
    finally:
        engine.close()


def test_a_seed_gives_the_answer_that_it_gives_on_a_cpu() -> None:
    answers = []
    hot = Sampling(temperature=1.3, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, seed=11)
    for device in ("cuda:0", "cpu"):
        model = build_model("rand").to(device)  # the same weights on both
        ready = dataclasses.replace(loaded(model, byte_level(), frozenset()), device=torch.device(device))
        engine = LLMEngine(EngineConfig(model="tiny", device=device), device, load=lambda _, ready=ready: ready)
        try:
            recorder = up(engine)
            ask(engine, "a", PROMPTS[4], stop=STOP, sampling=hot)
            assert isinstance(recorder.wait_end("a"), Finished)
            answers.append(recorder.ids("a"))
        finally:
            engine.close()
    assert answers[0] == answers[1]


def test_a_real_size_fills_the_memory_with_cache_and_serves_many() -> None:
    engine = LLMEngine(EngineConfig(model="qwen2.5-7b", load_format="dummy", device="cuda:0"), "big/0")
    try:
        recorder = up(engine)
        assert engine.text.info.dtype == "bfloat16"
        free, total = torch.cuda.mem_get_info(CARD)
        assert free < 0.25 * total
        prompts = [tuple(random.Random(n).choices(range(1000), k=50 + 37 * n)) for n in range(24)]
        for number, prompt in enumerate(prompts):
            ask(engine, str(number), prompt, stop=STOP)
        for number in range(len(prompts)):
            assert isinstance(recorder.wait_end(str(number)), Finished)
            assert len(recorder.ids(str(number))) == NEW
        ask(engine, "again", prompts[5], stop=STOP)
        end = recorder.wait_end("again")
        assert isinstance(end, Finished)
        assert end.usage.cached_prompt_tokens >= 32 * (len(prompts[5]) // 32 - 1)
        assert len(set(recorder.ids("again"))) > 3  # random, but not flat
    finally:
        engine.close()
    del engine
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(CARD)[0] > 0.8 * torch.cuda.mem_get_info(CARD)[1], "closing frees the card"
