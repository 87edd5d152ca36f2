"""Continuous batching on one device: streams join and leave at every step. Knows no server.

Two threads. The owner plans, launches and collects steps; the detokenizer turns tokens into text and events. A step,
on the owner thread: let in, let go, plan, launch, collect. Where the device works on its own, the next step is
launched before the one before is collected: a plan needs counts only, and the tokens are on the device already.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from mini_infer.engines.api import (
    EngineKind,
    FinishReason,
    PreparedRequest,
    Sampling,
    Started,
    StopConditions,
    TextModel,
)
from mini_infer.engines.assembly import Assembly, Tuning, assemble
from mini_infer.engines.batch import Batch
from mini_infer.engines.config import EngineConfig, canonical_label
from mini_infer.engines.detokenizer import Detokenizer
from mini_infer.engines.devices import resolve_device
from mini_infer.engines.errors import EngineFailed, MiniInferError, OutOfMemory, one_line
from mini_infer.engines.launching import Failure, Launch, launch
from mini_infer.engines.model import LoadedModel, load_model
from mini_infer.engines.offline import Collector, generate
from mini_infer.engines.owner import OwnedEngine, unstarted_end

DETOKENIZER_TIMEOUT_S = 5.0
"""How long the end of the engine waits for text that is still in the making."""


class LLMEngine(OwnedEngine):
    """One copy of a model that serves up to ``max_running`` streams at once.

    ``load`` builds the model, on the owner thread. A model that this engine would not serve exactly ends its start
    with `NotExact`. ``tuning`` is the device's own where it is not given.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str = "engine/0",
        *,
        load: Callable[[EngineConfig], LoadedModel] = load_model,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(engine_id, EngineKind.REPLICA, (canonical_label(config.device),), config.num_slots)
        self._config, self._load_model, self._tuning = config, load, tuning
        self._parts: Assembly | None = None
        self._detokenizer: Detokenizer | None = None
        self._collector: Collector | None = None  # of an engine that is used offline
        self._run_ahead = False
        self._in_flight: deque[Launch] = deque()
        self._begun: set[str] = set()  # streams that the detokenizer knows
        self._ended: SimpleQueue[str] = SimpleQueue()  # streams that ended by themselves

    # --- from any thread --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 128,
        *,
        sampling: Sampling = Sampling(),
        stop: StopConditions = StopConditions(),
    ) -> list[str]:
        """Answers a list of prompts as they are, without a chat template, and returns the texts in their order.

        Blocking. Starts the engine the first time. Raises the error of the first answer that fails, `LoadError` where
        the engine does not come up, and `RuntimeError` where `start` has given its events to somebody else.
        """
        if self._collector is None:
            collector = Collector()
            self.start(collector)
            self._collector = collector
        return generate(self, self._collector, prompts, max_new_tokens, sampling=sampling, stop=stop)

    # --- on the owner thread ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self) -> TextModel:
        device = resolve_device(self._config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # this thread's current device, which kernels and caches go by
        with torch.inference_mode(False):
            loaded = self._load_model(self._config)
        tuning = self._tuning or Tuning.of(device)
        self._parts = assemble(self._config, loaded, tuning)
        self._run_ahead = tuning.run_ahead
        self._detokenizer = Detokenizer(
            self.engine_id,
            loaded.tokenizer,
            emit=self._pass_on,
            on_ended=self._note_ended,
            on_broken=self._inbox.wake,
        )
        return self._parts.text

    @torch.inference_mode()
    def _warm_up(self) -> None:
        self._drive.runner.try_out()

    @torch.inference_mode()
    def _step(self) -> None:
        self._let_in()
        self._let_go()
        batch = self._drive.scheduler.plan()
        if batch is not None:
            self._begin(batch)
            self._launch(batch)
        if self._in_flight and (batch is None or len(self._in_flight) > self._run_ahead):
            self._collect()

    @torch.inference_mode()
    def _settle(self) -> None:
        self._clear_away()
        while self._in_flight:
            self._collect()

    def _next_step_ns(self) -> int | None:
        scheduler = self._drive.scheduler
        return 0 if self._in_flight or scheduler.num_running or scheduler.num_waiting else None

    def _abandon(self, error: MiniInferError) -> None:
        if self._detokenizer is not None:
            self._detokenizer.fail_all(error)
            self._detokenizer.close(DETOKENIZER_TIMEOUT_S)

    def _unload(self) -> None:
        self._in_flight.clear()
        self._parts = None

    @property
    def _drive(self) -> Assembly:
        assert self._parts is not None, "the model is loaded before anything runs"
        return self._parts

    @property
    def _text_side(self) -> Detokenizer:
        assert self._detokenizer is not None, "the model is loaded before anything runs"
        return self._detokenizer

    def _note_ended(self, keys: Sequence[str]) -> None:
        """Called by the detokenizer, on its thread, before the ends are out and the keys free again."""
        for key in keys:
            self._ended.put(key)
        self._inbox.wake()

    def _let_in(self) -> None:
        requests = self._inbox.take()
        self._clear_away()  # before a stream comes in under the key of one that ended
        for request in requests:
            try:
                self._drive.scheduler.add(request)
            except ValueError as error:  # it was prepared by an engine with a larger cache
                self._post(unstarted_end(request, OutOfMemory(one_line(error))))

    def _clear_away(self) -> None:
        """Frees what streams held that ended by themselves."""
        while not self._ended.empty():
            self._drop(self._ended.get())

    def _let_go(self) -> None:
        """Ends the streams that were cancelled or whose deadline passed, wherever they are."""
        if (broken := self._text_side.error) is not None:
            raise EngineFailed(f"engine {self.engine_id} makes no more text: {one_line(broken)}")
        for sequence in list(self._drive.scheduler.sequences):
            if (why := self._interruption(sequence.request)) is not None:
                self._end_stream(sequence.request, why)
        self._flush()  # nobody whose stream has ended waits for a step

    def _end_stream(self, request: PreparedRequest, why: FinishReason | MiniInferError) -> None:
        if request.key not in self._begun:
            self._post(unstarted_end(request, why))
        elif isinstance(why, FinishReason):
            self._text_side.finish(request.key, why)
        else:
            self._text_side.fail(request.key, why)
        self._drop(request.key)

    def _drop(self, key: str) -> None:
        """Frees slot and blocks of a stream."""
        self._drive.scheduler.remove(key)
        self._begun.discard(key)

    def _begin(self, batch: Batch) -> None:
        """Lets the streams begin that got their first slot."""
        new = [each.request for each in batch.admitted if each.request.key not in self._begun]
        if not new:
            return
        now_ns = time.monotonic_ns()
        self._post(*(Started(request.key, now_ns) for request in new))
        self._flush()
        for request in new:
            self._begun.add(request.key)
            sequence = self._drive.scheduler.get(request.key)
            assert sequence is not None, "what was admitted is here"
            self._text_side.begin(request, now_ns, sequence.num_cached_prompt_tokens)

    def _launch(self, batch: Batch) -> None:
        launched = launch(self._drive.runner, batch)
        self._in_flight.append(launched)
        if launched.failures:
            self._fail(launched.failures)

    def _fail(self, failures: Sequence[Failure]) -> None:
        """Ends the streams whose rows cannot be run, after what they have made so far has gone out."""
        while len(self._in_flight) > 1:
            self._collect()
        for failure in failures:
            self._text_side.fail(failure.row.key, failure.error)
            self._drop(failure.row.key)

    def _collect(self) -> None:
        """Awaits the oldest step and hands on what it chose."""
        launched = self._in_flight.popleft()
        counted = self._drive.scheduler.apply(launched.batch, launched.wait())
        if counted:
            tokens = [(sequence.request.key, choice) for sequence, choice in counted]
            self._text_side.push(tokens, time.monotonic_ns())
        self._end_step(len(counted))
