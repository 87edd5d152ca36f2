"""SCRIPT: a tiny Llama with real attention whose logits force chosen ids, looked up from the prompt.

It goes through the real `generate`. Faults and delays are set per script, and for the whole model by `broken`.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from support.events import up
from support.tokenizers import byte_level
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from mini_infer.engines.api import ModelInfo, StopConditions
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.generate_engine import GenerateEngine
from mini_infer.engines.model import LoadedModel
from mini_infer.engines.preparation import BUILT_IN_SAMPLING
from mini_infer.engines.prompt import PromptPreparer

EOS, END_OF_TURN, NO_TEXT = 256, 258, 600
"""BYTE's end token, its second one, and an id that the model has and the tokenizer does not."""
VOCAB, CONTEXT = 640, 256
FORCE = 40.0
WAIT_S = 20.0


class Gate:
    """Forwards wait here. A test sees how many came and lets some or all through."""

    def __init__(self, num_allowed: float = 0) -> None:
        self._changed = threading.Condition()
        self._num_allowed = num_allowed
        self.num_arrived = 0

    def pass_through(self) -> None:
        with self._changed:
            self.num_arrived += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_allowed >= 1, WAIT_S)
            self._num_allowed -= 1

    def wait_arrived(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_arrived >= number, WAIT_S)

    def let(self, number: float = 1) -> None:
        with self._changed:
            self._num_allowed += number
            self._changed.notify_all()

    def open(self) -> None:
        self.let(float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScript:
    """One answer. Steps count from 1, and step 1 is the prefill. After the last id comes the end token, for ever."""

    ids: Sequence[int] = ()
    prefill_s: float = 0.0
    step_s: float = 0.0
    gate: Gate | None = None
    fail_at: int | None = None
    error: BaseException | None = None
    nan_at: int | None = None
    flat: bool = False  # all ids equally likely, instead of `ids`
    raw: bool = False  # the model's own logits, instead of `ids`


class ScriptedLlama(LlamaForCausalLM):
    """Forces ids. ``scripts`` goes by prompt; its key None is for all other prompts."""

    def __init__(
        self, scripts: Mapping[tuple[int, ...] | None, ModelScript], *, std: float = 0.5, eos_id: int = EOS
    ) -> None:
        super().__init__(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT,
                initializer_range=std,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )
        self.scripts = scripts
        self._eos_id = eos_id
        self.broken: BaseException | None = None
        self.num_forwards = self.num_prefills = 0
        self._prompt: tuple[int, ...] = ()

    @functools.wraps(LlamaForCausalLM.forward)  # generate reads the signature
    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        num_past = cache.get_seq_length() if cache is not None else 0
        if not num_past:
            self._prompt = tuple(input_ids[0].tolist())
            self.num_prefills += 1
        self.num_forwards += 1
        step = num_past + input_ids.shape[1] - len(self._prompt) + 1
        script = self.scripts.get(self._prompt, self.scripts.get(None, ModelScript(raw=True)))
        self._misbehave(script, step)
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits[:, -1] = self._forced(script, step, output.logits[:, -1])
        return output

    def _misbehave(self, script: ModelScript, step: int) -> None:
        if script.gate is not None:
            script.gate.pass_through()
        time.sleep(script.prefill_s if step == 1 else script.step_s)
        if self.broken is not None:
            raise self.broken
        if step == script.fail_at:
            raise script.error or RuntimeError("scripted failure")

    def _forced(self, script: ModelScript, step: int, logits: torch.Tensor) -> torch.Tensor:  # [rows, vocab]
        if step == script.nan_at:
            return torch.full_like(logits, float("nan"))
        if script.raw or script.flat:
            return logits if script.raw else torch.zeros_like(logits)
        forced = torch.tanh(logits)
        forced[:, script.ids[step - 1] if step <= len(script.ids) else self._eos_id] = FORCE
        return forced


def loaded(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int]) -> LoadedModel:
    """What the loader would hand over for a model that was made here."""
    model.eval().requires_grad_(False)
    model.generation_config = GenerationConfig()
    info = ModelInfo(
        source="test",
        context_length=CONTEXT,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        dtype="float32",
        eos_token_ids=tuple(sorted(eos)),
        has_chat_template=False,
        default_sampling=BUILT_IN_SAMPLING,
    )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        text=PromptPreparer(tokenizer=tokenizer, info=info),
        device=torch.device("cpu"),
    )


def scripted_engine(
    scripts: Mapping[str | tuple[int, ...] | None, ModelScript] | ModelScript,
    *,
    engine_id: str = "script/0",
    tokenizer: Callable[[], PreTrainedTokenizerBase] = byte_level,
    load_gate: threading.Event | None = None,
    load_error: BaseException | None = None,
    std: float = 0.5,
) -> tuple[GenerateEngine, ScriptedLlama]:
    """A GenerateEngine around SCRIPT, not yet started. Prompts may be given as text."""
    codec = tokenizer()
    by_prompt = {None: scripts} if isinstance(scripts, ModelScript) else scripts
    ids_of = {tuple(codec.encode(key)) if isinstance(key, str) else key: script for key, script in by_prompt.items()}
    torch.manual_seed(0)
    model = ScriptedLlama(ids_of, std=std, eos_id=codec.eos_token_id)

    def load(config: EngineConfig) -> LoadedModel:
        if load_gate is not None:
            assert load_gate.wait(WAIT_S)
        if load_error is not None:
            raise load_error
        ends = frozenset({codec.eos_token_id, END_OF_TURN})
        return loaded(model, codec, ends)

    return GenerateEngine(EngineConfig(model="script"), engine_id, load=load), model


HELLO = ModelScript(ids=list(b"Hello"))
ENDLESS = ModelScript(ids=list(b"abc ") * 60)
LONG = StopConditions(max_new_tokens=200)


@contextlib.contextmanager
def running(scripts=HELLO, **options):
    """A scripted engine that is READY, its model, and what it emits."""
    engine, model = scripted_engine(scripts, **options)
    try:
        yield engine, model, up(engine)
    finally:
        engine.close()
