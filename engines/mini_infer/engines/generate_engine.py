"""Any causal model of Hugging Face through its own ``model.generate``, one stream at a time. Knows no server.

What a stream gets and what becomes of one that breaks; how `generate` is driven is in `generate_call`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from mini_infer.engines.api import (
    EngineKind,
    FinishReason,
    OutputOptions,
    PreparedRequest,
    Started,
    StopConditions,
    TextModel,
)
from mini_infer.engines.batch import Choice
from mini_infer.engines.config import EngineConfig, canonical_label
from mini_infer.engines.delivery import EmitFailed
from mini_infer.engines.devices import is_out_of_memory, resolve_device
from mini_infer.engines.errors import EngineFailed, LoadError, MiniInferError, OutOfMemory, StreamFailed, one_line
from mini_infer.engines.generate_call import generate
from mini_infer.engines.model import LoadedModel, load_model
from mini_infer.engines.owner import OwnedEngine, unstarted_end
from mini_infer.engines.preparation import BUILT_IN_SAMPLING
from mini_infer.engines.streamer import TokenStreamer

_log = logging.getLogger(__name__)


class GenerateEngine(OwnedEngine):
    """Serves one model on one device. ``load`` builds it, on the owner thread."""

    def __init__(
        self, config: EngineConfig, engine_id: str, *, load: Callable[[EngineConfig], LoadedModel] = load_model
    ) -> None:
        super().__init__(engine_id, EngineKind.GENERATE, (canonical_label(config.device),), max_running=1)
        self._config = config
        self._load_model = load
        self._loaded: LoadedModel | None = None
        self._streamer: TokenStreamer | None = None  # of the stream that runs

    def _load(self) -> TextModel:
        device = resolve_device(self._config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # this thread's current device, which kernels and caches go by
        loaded = self._load_model(self._config)
        if loaded.model.config.is_encoder_decoder or not loaded.model.can_generate():
            raise LoadError(f"{self._config.model} is no causal language model: {type(loaded.model).__name__}")
        self._loaded = loaded
        return loaded.text

    def _warm_up(self) -> None:
        """Two real tokens: one prefill and one step."""
        request = PreparedRequest(
            key="",
            prompt_ids=(0,),
            sampling=BUILT_IN_SAMPLING,
            stop=StopConditions(max_new_tokens=2),
            eos_token_ids=frozenset(),
            limit_reason=FinishReason.MAX_NEW_TOKENS,
            output=OutputOptions(),
        )
        generate(self._model, request, lambda _: False)

    def _unload(self) -> None:
        self._loaded = self._streamer = None

    def _abandon(self, error: MiniInferError) -> None:
        if self._streamer is not None:
            self._streamer.fail(error)

    @property
    def _model(self) -> LoadedModel:
        assert self._loaded is not None, "the model is loaded before anything runs"
        return self._loaded

    def _step(self) -> None:
        for request in self._inbox.take():
            if (why := self._interruption(request)) is not None:
                self._post(unstarted_end(request, why))
            else:
                self._serve(request)

    def _serve(self, request: PreparedRequest) -> None:
        """Runs one stream from its first token to its end."""
        try:
            streamer = TokenStreamer(self._model.tokenizer, request=request, sink=self._post)
        except ValueError as error:  # an empty stop string
            self._post(unstarted_end(request, StreamFailed(one_line(error, named=True))))
            return
        self._streamer = streamer
        streamer.answer.admitted_ns = admitted_ns = time.monotonic_ns()
        self._post(Started(request.key, admitted_ns))
        self._flush()
        failure = self._try_generate(request, streamer)
        if isinstance(failure, EngineFailed):
            self._prove_alive()
        if failure is not None:
            self._fail(streamer, failure)
        self._streamer = None
        self._flush()

    def _fail(self, streamer: TokenStreamer, error: MiniInferError) -> None:
        """Ends a stream badly. Its tokenizer may break on the text held back; the end is out all the same."""
        try:
            streamer.fail(error)
        except Exception:  # noqa: BLE001  # a tokenizer's own code raises anything; it ends one stream, no engine
            _log.exception("engine %s: text held back was lost", self.engine_id)

    def _prove_alive(self) -> None:
        """One real generation after a broken step; what it raises ends the engine.

        The broken stream keeps its slot until then, so that nobody is sent here in vain.
        """
        self._warm_up()
        _log.info("engine %s works again", self.engine_id)

    def _try_generate(self, request: PreparedRequest, streamer: TokenStreamer) -> MiniInferError | None:
        """Runs `generate`. What it raised is gone on return, and with it the frames that held the stream's cache."""

        def hand_over(choice: Choice) -> bool:
            why = self._interruption(request)
            if why is None:
                streamer.push_choice(choice)
            elif isinstance(why, FinishReason):
                streamer.finish(why)
            else:
                streamer.fail(why)
            self._end_step(num_tokens=why is None)
            return streamer.finished

        try:
            generate(self._model, request, hand_over)
        except EmitFailed:
            raise
        except StreamFailed as error:
            return type(error)(error.message)
        except Exception as error:  # noqa: BLE001  # a model's code raises anything; it is logged and passed on
            if is_out_of_memory(error):
                return OutOfMemory(f"the device has no memory left for this stream: {one_line(error, named=True)}")
            _log.exception("engine %s: stream %s broke a step", self.engine_id, request.key)
            return EngineFailed(f"engine {self.engine_id} failed in a step: {one_line(error, named=True)}")
        streamer.end()
        return None
