"""Loads a checkpoint's model and tokenizer onto a device, after looking at its files, and refuses what came out
incomplete. Knows no requests and no defaults.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mini_infer.engines.checkpoint import check_checkpoint
from mini_infer.engines.errors import LoadError
from mini_infer.engines.gguf_tokenizer import check_same_vocabulary, load_gguf_tokenizer
from mini_infer.engines.model_source import Source

_log = logging.getLogger(__name__)
_MAX_NAMES = 3


def load_pretrained(
    source: Source, device: torch.device, dtype: torch.dtype | None, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads what a source holds, in ``dtype`` or in the checkpoint's own.

    Raises `LoadError` for what the checks find; other exceptions are the library's own.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    if source.gguf_file is None:
        check_checkpoint(source.folder, on_cpu=device.type == "cpu", trust_remote_code=trust_remote_code)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.folder, **options)
    else:
        options["gguf_file"] = source.gguf_file
        AutoConfig.from_pretrained(source.folder, **options)  # fails early for an unknown architecture
        tokenizer = _gguf_tokenizer(source)
        # Unpacked: weights left in their blocks need a kernel that is fetched from the hub, and give other numbers.
        options["quantization_config"] = GgufConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.folder,
        dtype=dtype or "auto",
        device_map=None if device.type == "cpu" else {"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that they are reported by name, and refused below
        **options,
    )
    model, report = loaded  # a pair because of output_loading_info
    _refuse_incomplete(source, report)
    _check_vocabulary(source, model, tokenizer)
    return model, tokenizer


def wanted_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of a configured name; None means the checkpoint's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _gguf_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The source model's own tokenizer where it lies beside the file, else the one that the file describes."""
    path = source.folder / str(source.gguf_file)
    if not (source.folder / "tokenizer.json").is_file():
        return load_gguf_tokenizer(path)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    check_same_vocabulary(path, tokenizer)
    return tokenizer


def num_embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model can be fed."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _refuse_incomplete(source: Source, report: dict[str, Any]) -> None:
    for kind, what in (
        ("missing_keys", "lacks weights that the model needs"),
        ("mismatched_keys", "holds weights of another shape than its config.json says"),
        ("error_msgs", "could not be loaded"),
    ):
        if report.get(kind):
            names = sorted(str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in report[kind])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise LoadError(f"{source.folder} {what}: {', '.join(names[:_MAX_NAMES])}{more}")
    if report.get("unexpected_keys"):
        _log.warning("%s: %d weights are not used by the model", source.folder, len(report["unexpected_keys"]))


def _check_vocabulary(source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer without words; warns of one with more ids than the model, since requests are checked."""
    num_rows = num_embedding_rows(model)
    num_words = len(tokenizer) - len(tokenizer.all_special_ids)
    if num_words < 1:
        raise LoadError(f"the tokenizer in {source.folder} has no vocabulary")
    highest = max(tokenizer.get_vocab().values())
    if highest >= num_rows:
        _log.warning(
            "%s: the tokenizer has ids up to %d, the model %d rows; prompts with higher ids are refused",
            source.folder,
            highest,
            num_rows,
        )
