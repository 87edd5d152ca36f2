"""Loads one model onto one device, whole or not at all. Knows where models come from; runs none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from mini_infer.engines.api import ChatMessage, ModelInfo
from mini_infer.engines.chat_template import template_of
from mini_infer.engines.config import DEFAULT_MODEL, EngineConfig
from mini_infer.engines.default_model import load_default
from mini_infer.engines.devices import resolve_device
from mini_infer.engines.errors import InvalidRequest, LoadError, StreamFailed, one_line
from mini_infer.engines.generation_defaults import context_length, default_sampling, eos_token_ids
from mini_infer.engines.model_source import find_source
from mini_infer.engines.pretrained import load_pretrained, num_embedding_rows, wanted_dtype
from mini_infer.engines.prompt import PromptPreparer
from mini_infer.engines.shapes import randomise_weights, shape_config
from mini_infer.engines.synthetic_tokenizer import synthetic_tokenizer

_log = logging.getLogger(__name__)
_LOADING = threading.Lock()
"""Loading changes state of the whole process (torch's default dtype, patched initialisers): one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, in evaluation mode, with all that an engine needs beside it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: PromptPreparer
    device: torch.device


def load_model(config: EngineConfig) -> LoadedModel:
    """Loads what ``config`` names. Blocking; safe from any thread.

    Raises:
        LoadError: In one line: what is missing, damaged, unknown or too large. Nothing incomplete is ever returned.
    """
    device = resolve_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    with _LOADING, _quiet_transformers():
        try:
            model, tokenizer = _load(config, device)
            return _finish(config, device, model.eval().requires_grad_(False), tokenizer)
        except LoadError as error:
            message = error.message
            _log.debug("loading failed", exc_info=True)
        except Exception as error:  # noqa: BLE001  # loaders raise anything: OSError, KeyError, errors of their own
            message = f"{config.model} cannot be loaded: {one_line(error)}"
            _log.debug("loading failed", exc_info=True)
    # Raised out here, without the frames of the failure: those would keep a half-loaded model in memory for as long
    # as anybody keeps the error.
    raise LoadError(message)


def _load(config: EngineConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if config.load_format == "dummy":
        return _load_dummy(config, device)
    if config.model == DEFAULT_MODEL:
        return load_default(config, device)
    return load_pretrained(
        find_source(config.model, config.revision),
        device,
        wanted_dtype(config.dtype, device),
        trust_remote_code=config.trust_remote_code,
    )


def _load_dummy(config: EngineConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Random weights, made on the device and never copied."""
    shape = shape_config(config.model)
    tokenizer = synthetic_tokenizer(shape.vocab_size)
    shape.eos_token_id = tokenizer.eos_token_id
    shape.bos_token_id = shape.pad_token_id = None
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(shape, dtype=wanted_dtype(config.dtype, device) or shape.dtype)
    model.tie_weights()  # which is part of the initialisation that was left out
    randomise_weights(model)
    return model, tokenizer


def _finish(
    config: EngineConfig, device: torch.device, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> LoadedModel:
    """Reads the model's own defaults, then takes them out of `generate`'s sight."""
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(config.chat_template))
    generation = model.generation_config or GenerationConfig()
    info = ModelInfo(
        source=config.model,
        context_length=context_length(model.config, config.max_context),
        vocab_size=num_embedding_rows(model),
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=tuple(sorted(eos_token_ids(tokenizer, model.config, generation))),
        has_chat_template=template_of(tokenizer) is not None,
        default_sampling=default_sampling(config.default_sampling, generation),
    )
    # `generate` takes from here what it is not given: a file's max_length or penalty would win over our own defaults.
    model.generation_config = GenerationConfig()
    text = PromptPreparer(tokenizer=tokenizer, info=info)
    if config.chat_template is not None:
        _try_template(config.chat_template, text)
    _log_loaded(info, model, device)
    return LoadedModel(model=model, tokenizer=tokenizer, text=text, device=device)


def _log_loaded(info: ModelInfo, model: PreTrainedModel, device: torch.device) -> None:
    _log.info(
        "loaded %s: %s, %.1fM parameters, %s on %s, attention %s, context %d, torch %s, transformers %s",
        info.source,
        type(model).__name__,
        model.num_parameters() / 1e6,
        info.dtype,
        device,
        model.config._attn_implementation,
        info.context_length,
        torch.__version__,
        transformers.__version__,
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"chat_template {path} cannot be read: {error}") from error


def _try_template(path: str, text: PromptPreparer) -> None:
    """Fails the load for a template that breaks on the simplest conversation; one may refuse it for its own reasons."""
    try:
        text.tokenize((ChatMessage("user", "Hello"),))
    except StreamFailed as error:
        raise LoadError(f"chat_template {path}: {error}") from error
    except InvalidRequest:
        pass


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, and no table of weights: what is in it is refused or logged by us, in one line."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    report = logging.getLogger("transformers.modeling_utils")
    transformers_logging.disable_progress_bar()
    report.addFilter(_is_not_load_report)
    try:
        yield
    finally:
        report.removeFilter(_is_not_load_report)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _is_not_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
