"""Checkpoints that must never be served: each is refused quickly, in one line that names what is wrong."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import save_model

from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError
from mini_infer.engines.model import load_model

Damage = Callable[[Path], None]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("whole"))


def refusal(folder: Path | str, **options: object) -> str:
    """The one line of the refusal."""
    with pytest.raises(LoadError) as caught:
        load_model(EngineConfig(model=str(folder), **options))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    # No frame of the failure is kept, and so no half-loaded model.
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    return message


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def drop_first(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)[1:]}


def edit_index(folder: Path, shard: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))


def other_shard(folder: Path) -> str:
    """A shard that does not hold the embedding."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(shard for shard in weight_map.values() if shard != weight_map["model.embed_tokens.weight"])


SHARD_DAMAGE: dict[str, tuple[Damage, str]] = {
    "missing shard": (lambda f: shards(f)[1].unlink(), "model-00002-of"),
    "renamed shard": (lambda f: shards(f)[1].rename(f / "weights.safetensors") and None, "model-00002-of"),
    "cut by 1 KB": (lambda f: cut(shards(f)[-1], 1024), "damaged or incomplete: it should have"),
    "cut by 1 byte": (lambda f: cut(shards(f)[0], 1), "model-00001-of"),
    "longer than it says": (lambda f: os.truncate(shards(f)[0], 10_000_000), "model-00001-of"),
    "empty shard": (lambda f: os.truncate(shards(f)[0], 0), "model-00001-of"),
    "cut inside the header": (lambda f: os.truncate(shards(f)[0], 40), "its header is longer than the file"),
    "key missing in its shard": (lambda f: rewrite(shards(f)[0], drop_first), "which it does not"),
    "index names a missing file": (lambda f: edit_index(f, "model-99999.safetensors"), "model-99999.safetensors"),
    "index names the wrong file": (lambda f: edit_index(f, other_shard(f)), "which it does not"),
    "broken index": (lambda f: cut(f / INDEX, 5), f"{INDEX} cannot be read as JSON"),
    "empty index": (lambda f: (f / INDEX).write_text("{}") and None, "has no weight_map"),
    "index that is a list": (lambda f: (f / INDEX).write_text("[]") and None, "has no weight_map"),
}


@pytest.mark.floor
@pytest.mark.parametrize("name", SHARD_DAMAGE)
def test_damaged_shards(name: str, sharded: Path, tmp_path: Path) -> None:
    damage, expected = SHARD_DAMAGE[name]
    shutil.copytree(sharded, tmp_path / "copy")
    damage(tmp_path / "copy")
    assert expected in refusal(tmp_path / "copy")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


FILE_DAMAGE: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "key missing": (
        lambda f: rewrite(f / "model.safetensors", drop_first),
        "lacks weights that the model needs",
    ),
    "key renamed": (
        lambda f: rewrite(
            f / "model.safetensors", lambda t: {k.replace("layers.1.mlp", "layers.1.ffn"): v for k, v in t.items()}
        ),
        "model.layers.1.mlp.down_proj.weight",
    ),
    "another shape": (
        lambda f: rewrite(f / "model.safetensors", lambda t: t | {"lm_head.weight": torch.zeros(100, 64)}),
        "lm_head.weight",
    ),
    "config asks for more layers": (lambda f: edit_config(f, num_hidden_layers=3), "model.layers.2"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda f: cut(f / "config.json", 3), "config.json cannot be read as JSON"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]") and None, "is not a JSON object"),
    "unknown architecture": (lambda f: edit_config(f, model_type="made_up"), "made_up"),
    "no model type": (lambda f: (f / "config.json").write_text("{}") and None, "cannot be loaded"),
    "not a language model": (
        lambda f: edit_config(f, model_type="vit", architectures=["ViTModel"]),
        "cannot be loaded",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    "broken tokenizer": (lambda f: cut(f / "tokenizer.json", 20), "tokenizer.json cannot be read as JSON"),
    "tokenizer of other content": (lambda f: (f / "tokenizer.json").write_text("{}") and None, "cannot be loaded"),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json cannot be read as JSON",
    ),
    "weights that are no weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"<html></html>"),
        "damaged",
    ),
    "a pointer of git-lfs": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "damaged",
    ),
}


@pytest.mark.floor
@pytest.mark.parametrize("name", FILE_DAMAGE)
def test_damaged_files(name: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage, expected = FILE_DAMAGE[name]
    shutil.copytree(whole, tmp_path / "copy")
    damage(tmp_path / "copy")
    with caplog.at_level(logging.WARNING):
        assert expected in refusal(tmp_path / "copy")
    assert not any("\n" in record.getMessage() for record in caplog.records)


def test_damaged_torch_weights(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    weights = tmp_path / "copy" / "pytorch_model.bin"
    torch.save(load_file(tmp_path / "copy" / "model.safetensors"), weights)
    (tmp_path / "copy" / "model.safetensors").unlink()
    load_model(EngineConfig(model=str(tmp_path / "copy")))
    cut(weights, 1024)
    assert "pytorch_model.bin" in refusal(tmp_path / "copy")


def test_empty_folder(tmp_path: Path) -> None:
    assert f"{tmp_path} is empty" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/no/such/folder", "is neither a folder, a .gguf file nor a hub id"),
        ("./absent", "is neither a folder"),
        ("~/absent/folder", "is neither a folder"),
        ("a/b/c", "is neither a folder"),
        ("absent.gguf", "is neither a folder"),
        ("owner/absent.gguf", "is neither a folder"),
        ("C:\\models\\x", "is neither a folder"),
    ],
)
def test_no_such_place(model: str, expected: str) -> None:
    assert expected in refusal(model)


def test_revision_of_a_folder(whole: Path) -> None:
    assert "revision v2 is for hub ids" in refusal(whole, revision="v2")


def test_other_files_do_not_matter(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "trainer_state.json").write_text("{broken")
    load_model(EngineConfig(model=str(tmp_path / "copy")))


def test_a_file_that_is_no_model(whole: Path) -> None:
    assert "name the folder" in refusal(whole / "config.json")


def test_hub_id_without_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    told = refusal("nobody/absent", revision="v2")
    assert "nobody/absent at revision v2 could not be fetched" in told
    assert told.endswith("outgoing traffic has been disabled")  # the library's first sentence, and all of it


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_weights_that_need_a_gpu(method: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    edit_config(tmp_path / "copy", quantization_config={"quant_method": method, "bits": 4})
    assert f"quantised with {method}, which need a GPU" in refusal(tmp_path / "copy")


def test_quantisation_nobody_knows(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    edit_config(tmp_path / "copy", quantization_config={"quant_method": "made_up", "bits": 4})
    assert "made_up" in refusal(tmp_path / "copy")


def test_code_of_its_own_is_not_run(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "modeling_own.py").write_text("raise SystemExit('code ran')\n")
    edit_config(
        tmp_path / "copy",
        model_type="own",
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    )
    assert "trust_remote_code is off" in refusal(tmp_path / "copy")


def test_tokenizer_code_of_its_own_is_not_run(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy" / "tokenization_own.py").write_text("raise SystemExit('code ran')\n")
    config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "copy" / "tokenizer_config.json").write_text(json.dumps(config))
    assert "trust_remote_code" in refusal(tmp_path / "copy")
