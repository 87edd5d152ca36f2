"""The three sides: an engine, plain transformers and a server answer the same prompts, and say when it went wrong."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support import scripted_server
from support.process import wait_for_line

from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError, StreamFailed
from mini_infer.engines.model import load_model
from mini_infer.engines.scripted_engine import Script, ScriptedEngine
from mini_infer.server.bench import plain_side
from mini_infer.server.bench.engine_side import running
from mini_infer.server.bench.grpc_side import GrpcSide
from mini_infer.server.bench.plain_side import PlainSide
from mini_infer.server.bench.prompts import Prompts
from mini_infer.server.bench.server_process import running_server, settings, words
from mini_infer.server.bench.side import BenchError, Run
from mini_infer.server.config import load_config

PROMPTS = Prompts(100).many(3, 4)
TINY = EngineConfig(model="tiny", load_format="dummy", num_threads=1)


def assert_complete(run: Run, num_tokens: int) -> None:
    assert [len(stream) for stream in run.token_ns] == [num_tokens] * len(PROMPTS)
    for stream in run.token_ns:
        assert run.begin_ns < stream[0]
        assert list(stream) == sorted(stream)


# --- an engine ----------------------------------------------------------------------------------------------------


def test_an_engine_gets_all_prompts_at_once_and_makes_every_token() -> None:
    engine = ScriptedEngine(max_running=3)
    with running(engine) as side:
        assert_complete(side.run(PROMPTS, 6), 6)  # on past the end of the echo
        assert engine.peak_running == 3
        assert_complete(side.run(PROMPTS, 1), 1)


def test_an_engine_that_does_not_come_up_raises_what_it_says() -> None:
    with (
        pytest.raises(LoadError, match="no such model"),
        running(ScriptedEngine(load_error=LoadError("no such model"))),
    ):
        pass


def test_a_stream_that_fails_ends_the_round() -> None:
    engine = ScriptedEngine(scripts=Script(fail_at=2, error=StreamFailed("no numbers")), max_running=3)
    with running(engine) as side, pytest.raises(StreamFailed, match="no numbers"):
        side.run(PROMPTS, 3)


def test_an_answer_that_the_context_cuts_is_no_result() -> None:
    with running(ScriptedEngine()) as side:
        room = side.engine.text.info.context_length
        with pytest.raises(BenchError, match="engine made"):
            side.run([PROMPTS[0]], room)


def test_an_engine_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.server.bench.engine_side.ROUND_TIMEOUT_S", 0.05)
    with (
        running(ScriptedEngine(scripts=Script(hang_at=1))) as side,
        pytest.raises(BenchError, match=r"more than 0\.05 s"),
    ):
        side.run(PROMPTS[:1], 1)


# --- plain transformers -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> PlainSide:
    return PlainSide(load_model(TINY))


def test_plain_answers_are_one_batch(plain: PlainSide) -> None:
    run = plain.run(PROMPTS, 5)
    assert_complete(run, 5)
    assert len(set(run.token_ns)) == 1


def test_plain_is_not_waited_for_for_ever(plain: PlainSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_side, "ROUND_TIMEOUT_S", 0.0)
    with pytest.raises(BenchError, match=r"model\.generate took more than 0 s"):
        plain.run(PROMPTS, 5)


# --- a server -----------------------------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, scripted_server.__file__, "{}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    yield wait_for_line(process, "serving on")
    process.kill()
    process.communicate()


def test_a_server_answers_over_grpc(address: str) -> None:
    with GrpcSide(address) as side:
        assert_complete(side.run(PROMPTS, 6), 6)
        with pytest.raises(BenchError, match="the server ended a stream: INVALID_ARGUMENT"):
            side.run([(2**31,)], 1)
        assert_complete(side.run(PROMPTS, 1), 1)


def test_a_server_process_is_asked_for_the_same_engine() -> None:
    engine = EngineConfig(
        model="tiny",
        load_format="dummy",
        device="cpu:1",
        dtype="bfloat16",
        max_context=99,
        num_threads=2,
        cache_tokens=640,
        prefix_cache=False,
    )
    config = load_config(words(settings(engine, "generate", 8)), {})
    (model,) = config.models
    assert model.pool.max_queue == 8
    assert [(group.kind, group.devices) for group in model.groups] == [("generate", ("cpu:1",))]
    for name in (
        "model",
        "load_format",
        "dtype",
        "max_context",
        "num_threads",
        "trust_remote_code",
        "revision",
        "cache_tokens",
        "prefix_cache",
    ):
        assert getattr(model.engine, name) == getattr(engine, name)
    assert (config.host, config.port, config.grace_s) == ("127.0.0.1", 0, 0.0)


def test_a_server_that_does_not_come_up_says_why() -> None:
    absent = EngineConfig(model="/no/such/folder")
    with pytest.raises(BenchError, match=r"did not come up.*/no/such/folder"), running_server(absent, "generate", 1):
        pass
