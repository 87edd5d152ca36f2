"""GenerateEngine on a real CUDA device; all of it is skipped where there is none."""

import subprocess
import sys

import pytest
import torch
from support.events import Recorder, ask, up

from mini_infer.engines.api import EngineState, Finished, FinishReason, OutputOptions, Sampling, StopConditions
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError
from mini_infer.engines.generate_engine import GenerateEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

EVERY_TOKEN = OutputOptions(token_ids=True, logprobs=True)
SIXTEEN = StopConditions(max_new_tokens=16, ignore_eos=True)


def ids_on(device: str, shape: str = "tiny", **wishes) -> list[int]:
    engine = GenerateEngine(EngineConfig(model=shape, load_format="dummy", device=device, dtype="float32"), device)
    try:
        recorder = up(engine)
        ask(engine, "a", "one two three", stop=SIXTEEN, output=EVERY_TOKEN, **wishes)
        assert isinstance(recorder.wait_end("a"), Finished)
        return recorder.ids("a")
    finally:
        engine.close()


def test_an_answer_on_the_card_is_its_own_model_s_greedy_answer():
    engine = GenerateEngine(EngineConfig(model="tiny", load_format="dummy", device="cuda:0", dtype="float32"), "e")
    try:
        recorder = up(engine)
        ask(engine, "a", "one two three", stop=SIXTEEN, output=EVERY_TOKEN)
        recorder.wait_end("a")
        model = engine._model.model
        prompt = torch.tensor([engine.text.tokenize("one two three")], device="cuda:0")
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert recorder.ids("a") == expected[0, prompt.shape[1] :].tolist()
    finally:
        engine.close()


def test_the_same_seed_gives_the_same_answer_on_the_card():
    hot = Sampling(temperature=2.0, seed=7)
    assert ids_on("cuda:0", sampling=hot) == ids_on("cuda:0", sampling=hot)
    assert ids_on("cuda:0", sampling=hot) != ids_on("cuda:0", sampling=Sampling(temperature=2.0, seed=8))


def test_a_real_size_is_made_on_the_device_and_streams():
    engine = GenerateEngine(EngineConfig(model="qwen2.5-7b", load_format="dummy", device="cuda:0"), "e")
    try:
        recorder = up(engine)
        assert engine.text.info.dtype == "bfloat16"
        ask(engine, "a", "one two three", stop=SIXTEEN, output=EVERY_TOKEN)
        end = recorder.wait_end("a")
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.MAX_NEW_TOKENS
        assert len(set(recorder.ids("a"))) > 3  # random, but not flat
    finally:
        engine.close()


def test_a_model_that_the_card_cannot_hold_is_refused_in_one_line():
    recorder = Recorder()
    wide = EngineConfig(model="qwen2.5-72b", load_format="dummy", device="cuda:0", dtype="float32")  # 290 GB
    engine = GenerateEngine(wide, "e")
    try:
        engine.start(recorder)
        error = recorder.wait_state(EngineState.FAILED).error
        assert isinstance(error, LoadError)
        assert "\n" not in str(error)
        assert "memory" in str(error)
    finally:
        engine.close()


def test_a_card_that_is_not_there_is_refused_by_number():
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "mini_infer.server",
            "--load-format",
            "dummy",
            "--model",
            "tiny",
            "--devices",
            "cuda:99",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "cuda:99" in result.stderr
    assert "Traceback" not in result.stderr
