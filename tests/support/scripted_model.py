"""SCRIPT: a tiny Llama with real attention whose logits force chosen ids, looked up from the prompt.

It goes through the real `generate`, or through the real packed step of an `LLMEngine`. Faults and delays are set per
script, and for the whole model by its attributes.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.events import up
from support.tokenizers import byte_level
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from mini_infer.engines.api import ModelInfo, StopConditions
from mini_infer.engines.assembly import Tuning
from mini_infer.engines.batch import Batch
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.generate_engine import GenerateEngine
from mini_infer.engines.llm_engine import LLMEngine
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
    """One answer. After the last id comes the end token, for ever.

    Steps count from 1, and step 1 is the prefill. A chunk of a prefill that is not its last has the number of the step
    that its last token would be, which is 0 or less where it is computed for the first time.
    """

    ids: Sequence[int] = ()
    prefill_s: float = 0.0
    step_s: float = 0.0
    gate: Gate | None = None
    fail_at: int | None = None
    error: BaseException | None = None
    nan_at: int | None = None
    flat: bool = False  # all ids equally likely, instead of `ids`
    raw: bool = False  # the model's own logits, instead of `ids`


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's share of a forward: its tokens from ``start`` to the last of ``token_ids`` are fed."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]  # all up to the last one fed
    start: int
    samples: bool

    @property
    def step(self) -> int:
        return len(self.token_ids) - len(self.prompt) + 1


class ScriptedLlama(LlamaForCausalLM):
    """Forces ids. ``scripts`` goes by prompt; its key None is for all other prompts, that of the warm-up among them.

    ``gate``, ``broken``, ``max_rows`` and ``max_length`` may be set at any time: every forward waits, raises, or finds
    no memory for more rows or for a longer row. ``forwards`` has one entry for each forward that was tried.
    """

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
        self.gate: Gate | None = None
        self.broken: BaseException | None = None
        self.max_rows = self.max_length = 10**9
        self.forwards: list[tuple[Part, ...]] = []
        self.look: Callable[[], tuple[Part, ...]] | None = None  # at the rows of the packed step that is launched
        self._token_ids: tuple[int, ...] = ()  # of the call of `generate` that runs
        self._prompt: tuple[int, ...] = ()

    @property
    def num_forwards(self) -> int:
        return len(self.forwards)

    @property
    def num_prefills(self) -> int:
        return sum(part.start == 0 for parts in self.forwards for part in parts)

    @functools.wraps(LlamaForCausalLM.forward)  # generate reads the signature
    def forward(self, input_ids=None, **kwargs):
        if self.look is None and not kwargs.get("use_cache", True):  # somebody looks at the model itself
            return super().forward(input_ids=input_ids, **kwargs)
        parts = self._parts_of_generate(input_ids, kwargs) if self.look is None else self.look()
        self.forwards.append(parts)
        self._misbehave(parts)
        output = super().forward(input_ids=input_ids, **kwargs)
        sampling = [part for part in parts if part.samples]
        logits = output.logits[0]  # [rows, vocab]; the last ones are wanted
        for row, part in enumerate(sampling, len(logits) - len(sampling)):
            logits[row] = self._forced(self._script(part), part.step, logits[row])
        return output

    def _parts_of_generate(self, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> tuple[Part, ...]:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        num_past = cache.get_seq_length() if cache is not None else 0
        self._token_ids = (*self._token_ids[:num_past], *input_ids[0].tolist())
        if not num_past:
            self._prompt = self._token_ids
        return (Part(self._prompt, self._token_ids, num_past, samples=True),)

    def _script(self, part: Part) -> ModelScript:
        return self.scripts.get(part.prompt, self.scripts.get(None, ModelScript(raw=True)))

    def _misbehave(self, parts: Sequence[Part]) -> None:
        scripts = [(self._script(part), part.step) for part in parts]
        for gate in {script.gate for script, _ in scripts} | {self.gate}:
            if gate is not None:
                gate.pass_through()
        time.sleep(max(script.prefill_s if step == 1 else script.step_s for script, step in scripts))
        if self.broken is not None:
            raise self.broken
        if len(parts) > self.max_rows or max(len(part.token_ids) for part in parts) > self.max_length:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        for script, step in scripts:
            if step == script.fail_at:
                raise script.error or RuntimeError("scripted failure")

    def _forced(self, script: ModelScript, step: int, logits: torch.Tensor) -> torch.Tensor:  # [vocab]
        if step == script.nan_at:
            return torch.full_like(logits, float("nan"))
        if script.raw or script.flat:
            return logits if script.raw else torch.zeros_like(logits)
        forced = torch.tanh(logits)
        forced[script.ids[step - 1] if step <= len(script.ids) else self._eos_id] = FORCE
        return forced


class ScriptedLLMEngine(LLMEngine):
    """An LLMEngine that shows SCRIPT whose rows are in a step. ``wait_error`` is raised where a step is collected."""

    wait_error: BaseException | None = None

    def _load(self):
        text = super()._load()
        runner, model = self._drive.runner, self._drive.runner._stages[0]._model
        launch, prompts = runner.launch, {}

        def look(batch: Batch) -> tuple[Part, ...]:
            parts = []
            for row in batch.rows:
                ids = tuple(runner._tables.tokens[row.slot, : row.start + row.num_tokens].tolist())
                prompt = prompts[row.slot]
                assert ids[: len(prompt)] == prompt[: len(ids)], "the device does not hold this prompt"
                parts.append(Part(prompt, ids, row.start, row.samples))
            return tuple(parts)

        def watched(batch: Batch):
            prompts.update((each.slot, each.request.prompt_ids) for each in batch.admitted)
            model.look = functools.partial(look, batch)
            try:
                launched = launch(batch)
            finally:
                model.look = None
            launched.wait = functools.partial(self._wait, launched.wait)
            return launched

        runner.launch = watched
        return text

    def _wait(self, wait):
        if self.wait_error is not None:
            raise self.wait_error
        return wait()

    @property
    def scheduler(self):
        """To be looked at while the engine stands still."""
        return self._drive.scheduler

    @property
    def pool(self):
        return self.scheduler._pool


def loaded(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, eos: frozenset[int], context: int = CONTEXT
) -> LoadedModel:
    """What the loader would hand over for a model that was made here."""
    model.eval().requires_grad_(False)
    model.generation_config = GenerationConfig()
    info = ModelInfo(
        source="test",
        context_length=context,
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


GENERATE, PACKED, AHEAD = "generate", "packed", "packed, run ahead"
"""The kinds of engines that run SCRIPT."""


def scripted_engine(
    scripts: Mapping[str | tuple[int, ...] | None, ModelScript] | ModelScript,
    *,
    kind: str = GENERATE,
    engine_id: str = "script/0",
    tokenizer: Callable[[], PreTrainedTokenizerBase] = byte_level,
    load_gate: threading.Event | None = None,
    load_error: BaseException | None = None,
    std: float = 0.5,
    block_size: int = 4,
    max_context: int = CONTEXT,
    **config: Any,
) -> tuple[GenerateEngine | ScriptedLLMEngine, ScriptedLlama]:
    """An engine around SCRIPT, not yet started. Prompts may be given as text."""
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
        return loaded(model, codec, ends, max_context)

    made_of = EngineConfig(model="script", **config)
    if kind == GENERATE:
        return GenerateEngine(made_of, engine_id, load=load), model
    tuning = Tuning(block_size=block_size, run_ahead=kind == AHEAD)
    return ScriptedLLMEngine(made_of, engine_id, load=load, tuning=tuning), model


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


def assert_rested(engine):
    """All is given back. To be called when every stream has had its end."""
    engine._executor.submit(int).result()
    assert engine.stats().num_running == engine.scheduler.num_sequences == 0
    assert engine.pool.num_free == engine.pool.capacity
    engine.pool.check()
    assert not engine._inbox.held | engine._inbox.cancelled | engine._begun
    assert not engine._in_flight
