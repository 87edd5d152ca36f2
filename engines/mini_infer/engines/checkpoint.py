"""Looks at the files of a checkpoint before anything is loaded: complete, readable, servable here. Loads nothing.

Loaders fill what they cannot find with random numbers and say so in a warning; here it is refused, with the name of
the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from transformers import CONFIG_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from mini_infer.engines.errors import LoadError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
)
_SAFETENSORS_INDEX = "model.safetensors.index.json"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_NEEDS_GPU = ("aqlm", "awq", "eetq", "exl2", "fbgemm_fp8", "fp8", "fp_quant", "gptq", "higgs", "quip", "spqr", "vptq")


def check_checkpoint(folder: Path, *, on_cpu: bool, trust_remote_code: bool) -> None:
    """Raises `LoadError`, in one line, for a folder that cannot be served as it is."""
    if not any(folder.iterdir()):
        raise LoadError(f"{folder} is empty")
    for name in _JSON_FILES:
        if (folder / name).is_file():
            read_json(folder / name)
    config = _read_config(folder)
    _check_code(folder, config, trust_remote_code)
    _check_quantization(folder, config, on_cpu)
    _check_tokenizer(folder)
    _check_weights(folder)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises `LoadError` where it is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}") from error


def check_safetensors(path: Path) -> set[str]:
    """The names of a safetensors file's tensors. Raises `LoadError` where the file is damaged or cut short.

    Reads the header only: 8 bytes of its length, little-endian, then JSON with the span of each tensor in the rest
    (https://huggingface.co/docs/safetensors, "Format").
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(header_bytes))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            if end != size:
                raise ValueError(f"it should have {end} bytes and has {size}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise LoadError(f"{path} is damaged or incomplete: {error}") from error
    return set(tensors)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} has no config.json")
    config = read_json(path)
    if not isinstance(config, dict):
        raise LoadError(f"{path} is not a JSON object")
    return config


def _check_code(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        raise LoadError(f"{folder} needs Python code of its own to run, and trust_remote_code is off")


def _check_quantization(folder: Path, config: dict[str, Any], on_cpu: bool) -> None:
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not quantization:
        return
    method = str(quantization.get("quant_method", "")).lower()
    if on_cpu and method in _NEEDS_GPU:
        raise LoadError(f"{folder} holds weights quantised with {method}, which need a GPU, and the device is a CPU")
    if not AutoHfQuantizer.supports_quant_method(quantization):  # transformers would read them as plain numbers
        raise LoadError(f"{folder} holds weights quantised with {method!r}, which transformers does not know")


def _check_tokenizer(folder: Path) -> None:
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return
    own = folder / "tokenizer_config.json"
    if own.is_file() and read_json(own).get("auto_map"):  # a tokenizer of its own, with files of its own
        return
    raise LoadError(f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")


def _check_weights(folder: Path) -> None:
    """Follows the order in which transformers looks for weights."""
    if (folder / "model.safetensors").is_file():
        check_safetensors(folder / "model.safetensors")
    elif (folder / _SAFETENSORS_INDEX).is_file():
        _check_shards(folder, _SAFETENSORS_INDEX)
    elif (folder / _TORCH_INDEX).is_file():
        shards = set(_weight_map(folder / _TORCH_INDEX).values())
        _check_present(folder, _TORCH_INDEX, shards)
        for shard in shards:
            _check_torch_file(folder / shard)
    elif (folder / "pytorch_model.bin").is_file():
        _check_torch_file(folder / "pytorch_model.bin")
    else:
        raise LoadError(f"{folder} has no weights: neither model.safetensors, {_SAFETENSORS_INDEX} nor .bin files")


def _check_shards(folder: Path, index: str) -> None:
    weight_map = _weight_map(folder / index)
    _check_present(folder, index, weight_map.values())
    held = {shard: check_safetensors(folder / shard) for shard in sorted(set(weight_map.values()))}
    stale = sorted(name for name, shard in weight_map.items() if name not in held[shard])
    if stale:
        raise LoadError(f"{folder / index} says that {weight_map[stale[0]]} holds {stale[0]}, which it does not")


def _check_torch_file(path: Path) -> None:
    """Files of `torch.save` are zip archives, whose directory is at the end; older ones cannot be checked cheaply."""
    try:
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                ZipFile(file).close()
    except (OSError, BadZipFile) as error:
        raise LoadError(f"{path} is damaged or incomplete: {error}") from error


def _check_present(folder: Path, index: str, shards: Iterable[str]) -> None:
    missing = sorted({shard for shard in shards if not (folder / shard).is_file()})
    if missing:
        raise LoadError(f"{folder / index} names {', '.join(missing)}, which is not there")


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{path} has no weight_map")
    return weight_map
