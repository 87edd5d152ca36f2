"""Plain transformers: one batch through ``model.generate``, as the library comes. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from mini_infer.engines.model import LoadedModel
from mini_infer.server.bench.prompts import Prompt
from mini_infer.server.bench.side import ROUND_TIMEOUT_S, BenchError, Run, finished_run


class PlainSide:
    """Answers with a loaded model that nothing else touches, so that its attention is transformers' own choice."""

    name = "plain"

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def run(self, prompts: Sequence[Prompt], num_new_tokens: int) -> Run:
        """Answers all prompts, of one length, as one batch: nothing is padded."""
        model: Any = self._loaded.model
        config = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=num_new_tokens, use_cache=True)
        begin_ns = time.monotonic_ns()
        stamps = _Stamps(begin_ns + int(ROUND_TIMEOUT_S * 1e9))
        input_ids = torch.tensor(prompts, device=self._loaded.device)  # [num_prompts, num_prompt_tokens]
        with torch.inference_mode():
            model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, streamer=stamps
            )
        return finished_run(self.name, begin_ns, [stamps.token_ns] * len(prompts), num_new_tokens)


class _Stamps(BaseStreamer):
    """Notes when each step's tokens are on the host: `generate` waits for them in every step anyway."""

    def __init__(self, deadline_ns: int) -> None:
        self.token_ns: list[int] = []
        self._deadline_ns = deadline_ns
        self._has_prompt = False

    def put(self, value: Any) -> None:  # noqa: ARG002  # a streamer's signature
        if not self._has_prompt:
            self._has_prompt = True  # `generate` hands over the prompt before the first token
            return
        self.token_ns.append(time.monotonic_ns())
        if self.token_ns[-1] > self._deadline_ns:
            raise BenchError(f"model.generate took more than {ROUND_TIMEOUT_S:g} s for one round")

    def end(self) -> None:
        pass
