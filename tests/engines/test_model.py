"""Loading a whole and sound model: its facts, its defaults, and several threads at once."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CONTEXT, VOCAB_SIZE, ZOO, build_model, rand_tied, save_model
from support.tokenizers import byte_level, word_level
from transformers import GenerationConfig

from mini_infer.engines.api import ChatMessage, Request, Sampling, StopConditions
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError
from mini_infer.engines.model import LoadedModel, load_model
from mini_infer.engines.shapes import SHAPES

TINY = EngineConfig(model="tiny", load_format="dummy")
PROMPT = torch.tensor([[72, 101, 108, 108, 111, 33, 32, 87, 104, 121, 63]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("rand"))


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **options))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(PROMPT).logits
    return result


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


@pytest.mark.floor
@pytest.mark.parametrize("name", ZOO)
def test_a_folder_gives_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    loaded = load(save_model(tmp_path, name))
    assert torch.equal(logits(loaded.model), logits(build_model(name)))
    assert not loaded.model.training
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.text.info.context_length == CONTEXT
    assert loaded.text.info.vocab_size == VOCAB_SIZE


def test_facts_of_a_folder(folder: Path) -> None:
    loaded = load(folder)
    info = loaded.text.info
    assert (info.source, info.dtype, info.has_chat_template) == (str(folder), "float32", True)
    assert info.eos_token_ids == (256,)
    assert loaded.device == torch.device("cpu")


def test_tiny_shape_chats() -> None:
    loaded = load_model(TINY)
    prepared = loaded.text.prepare(Request(key="a", chat=(ChatMessage("user", "Hello"),)))
    output = loaded.model.generate(torch.tensor([prepared.prompt_ids]), max_new_tokens=8, do_sample=False)
    assert output.shape[1] <= len(prepared.prompt_ids) + 8
    assert loaded.text.info.eos_token_ids == (loaded.tokenizer.eos_token_id,)
    assert torch.equal(logits(loaded.model), logits(load_model(TINY).model))


def test_tiny_shape_answers_depend_on_the_prompt() -> None:
    loaded = load_model(TINY)
    answers = set()
    for index in range(10):
        ids = torch.tensor([loaded.text.tokenize(f"prompt {index}")])
        output = loaded.model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
        answer = tuple(output[0, ids.shape[1] :].tolist())
        assert len(set(answer)) > 8
        answers.add(answer)
    assert len(answers) == 10


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_dtype_on_cpu(dtype: str, expected: str, tmp_path: Path) -> None:
    save_model(tmp_path, build_model().to(torch.bfloat16))
    for loaded in (
        load(tmp_path, dtype=dtype),
        load_model(EngineConfig(model="tiny", load_format="dummy", dtype=dtype)),
    ):
        assert loaded.text.info.dtype == expected
        floating = [parameter.dtype for parameter in loaded.model.parameters()]
        assert set(map(str, floating)) == {f"torch.{expected}"}
    assert torch.get_default_dtype() == torch.float32


def test_tied_head_saved_without_itself(tmp_path: Path) -> None:
    loaded = load(save_model(tmp_path, "rand_tied"))
    head: Any = loaded.model.get_output_embeddings()
    embedding: Any = loaded.model.get_input_embeddings()
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    assert torch.allclose(logits(loaded.model), logits(build_model("rand_tied")), atol=1e-5)


def test_tied_head_of_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.engines.model.shape_config", lambda name: rand_tied())
    loaded = load_model(TINY)
    assert torch.equal(logits(loaded.model), logits(build_model("rand_tied")))
    assert loaded.model.num_parameters() == build_model("rand_tied").num_parameters()


def test_context_is_the_models_own_or_less(folder: Path) -> None:
    assert load(folder, max_context=CONTEXT).text.info.context_length == CONTEXT
    assert load(folder, max_context=10).text.info.context_length == 10
    with pytest.raises(LoadError, match=f"max_context is {CONTEXT + 1}, but the model's own context is {CONTEXT}"):
        load(folder, max_context=CONTEXT + 1)


def test_end_tokens_are_those_of_all_three_files(tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=7)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[9, 11])
    assert load(tmp_path).text.info.eos_token_ids == (7, 9, 11, 256)


def test_no_end_token_at_all(tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=None)
    edit_json(tmp_path / "generation_config.json", eos_token_id=None)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None)
    loaded = load(tmp_path)
    assert loaded.text.info.eos_token_ids == ()
    assert loaded.text.prepare(Request(key="a", prompt="x")).eos_token_ids == frozenset()


SAMPLING_FILE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_length": 20,
}


@pytest.fixture(scope="module")
def sampling_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("sampling"))
    edit_json(folder / "generation_config.json", **SAMPLING_FILE)
    return folder


def test_defaults_come_from_the_models_file(sampling_folder: Path) -> None:
    default = load(sampling_folder).text.info.default_sampling
    assert default == Sampling(
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )


@pytest.mark.parametrize(
    ("field", "asked"),
    [("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)],
)
def test_request_goes_before_operator_before_file(sampling_folder: Path, field: str, asked: float) -> None:
    operator = Sampling(temperature=0.3, top_k=7, top_p=0.5, min_p=0.2, repetition_penalty=1.3)
    of_operator = load(sampling_folder, default_sampling=operator).text
    of_file = load(sampling_folder).text
    request = Request(key="a", prompt="x", sampling=Sampling(**{field: asked}))
    assert getattr(of_operator.prepare(request).sampling, field) == asked
    assert getattr(of_file.prepare(request).sampling, field) == asked
    plain = Request(key="a", prompt="x")
    assert getattr(of_operator.prepare(plain).sampling, field) == getattr(operator, field)
    assert getattr(of_file.prepare(plain).sampling, field) == SAMPLING_FILE[field]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        ({"do_sample": True, "top_k": 50}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.5}, {"temperature": 0.0, "top_k": 0}),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
    ],
)
def test_what_the_file_leaves_open(said: dict[str, Any], expected: dict[str, float], tmp_path: Path) -> None:
    save_model(tmp_path)
    edit_json(tmp_path / "generation_config.json", **said)
    default = load(tmp_path).text.info.default_sampling
    assert {name: getattr(default, name) for name in expected} == expected


@pytest.mark.floor
def test_generate_adds_nothing_from_the_file(sampling_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(sampling_folder)
    with caplog.at_level(logging.WARNING):
        output = loaded.model.generate(
            PROMPT, generation_config=GenerationConfig(do_sample=False, max_new_tokens=40, pad_token_id=0)
        )
    assert output.shape[1] == PROMPT.shape[1] + 40
    ids = PROMPT
    for _ in range(40):  # greedy, by hand
        with torch.no_grad():
            ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(output, ids)
    assert not caplog.records


@pytest.mark.floor
def test_eight_threads_load_at_once(folder: Path) -> None:
    expected = logits(build_model())
    failures: list[object] = []
    start = threading.Barrier(8)

    def load_some() -> None:
        try:
            start.wait()
            for _ in range(3):
                model = load(folder).model
                if any(parameter.is_meta for parameter in model.parameters()):
                    failures.append("meta")
                if not torch.equal(logits(model), expected):
                    failures.append("logits")
        except BaseException as error:  # noqa: BLE001 - the main thread asserts
            failures.append(error)

    threads = [threading.Thread(target=load_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert torch.get_default_dtype() == torch.float32


def test_one_line_tells_what_was_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        load(folder)
    (record,) = caplog.records
    assert record.name.startswith("mini_infer.engines")
    line = record.getMessage()
    for fact in (str(folder), "LlamaForCausalLM", "float32 on cpu", "attention sdpa", "context 128", torch.__version__):
        assert fact in line
    assert capfd.readouterr() == ("", "")  # no progress bars


def test_threads_of_torch(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        load(folder, num_threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_chat_template_of_the_operator(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    text = load(folder, chat_template=str(template)).text
    assert text.detokenize(text.tokenize((ChatMessage("user", "Hi"),))) == "[user] Hi\n"


@pytest.mark.parametrize(
    "content", ["{% for m in messages %}", "{{ messages.absent.name.of() }}{% endif %}", "{{ 1/0 }}"]
)
def test_broken_chat_template_of_the_operator(content: str, folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(content)
    with pytest.raises(LoadError, match=r"chat_template .*own\.jinja"):
        load(folder, chat_template=str(template))


def test_missing_chat_template_of_the_operator(folder: Path) -> None:
    with pytest.raises(LoadError, match=r"chat_template /absent\.jinja cannot be read"):
        load(folder, chat_template="/absent.jinja")


def test_absent_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LoadError, match="no CUDA device"):
        load(folder, device="cuda:0")


def test_a_second_cpu_label_is_the_same_cpu(folder: Path) -> None:
    assert torch.equal(logits(load(folder, device="cpu:1").model), logits(build_model()))


def test_unknown_shape_of_random_weights() -> None:
    with pytest.raises(LoadError, match="no shape is called 'absent'"):
        load_model(EngineConfig(model="absent", load_format="dummy"))
    assert "tiny" in SHAPES


def test_model_knows_more_ids_than_its_tokenizer(folder: Path) -> None:
    text = load(folder).text
    assert text.detokenize([72, 350, 105]) == "Hi"
    stop = StopConditions(token_ids=(383,))
    assert text.prepare(Request(key="a", prompt_token_ids=(350,), stop=stop)).prompt_ids == (350,)


def test_tokenizer_knows_more_ids_than_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(200)])
    save_model(tmp_path, "rand", tokenizer)
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert "the tokenizer has ids up to 458, the model 384 rows" in caplog.text


def test_pad_id_beyond_the_embedding_does_no_harm(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<extra_{index}>" for index in range(200)])
    tokenizer.pad_token = "<extra_199>"
    loaded = load(save_model(tmp_path, "rand", tokenizer))
    output = loaded.model.generate(PROMPT, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert output.shape[1] == PROMPT.shape[1] + 4


def test_word_tokenizer_loads(tmp_path: Path) -> None:
    assert load(save_model(tmp_path, "rand", word_level())).text.tokenize("Dear Sam,") != ()
