"""The process: what it prints, how it fails, and how it ends when it is told to."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import scripted_server
from support.process import TINY, running_server
from support.serving import outcome

from mini_infer.server.run import ONE_SIGNAL_S
from mini_infer.v1 import generation_pb2 as pb
from mini_infer.v1 import generation_pb2_grpc

WAIT_S = 60


def run_server(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mini_infer.server", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, **environ}
    )


def assert_one_line(told: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line for a person, and none of Python's."""
    (line,) = told.stderr.splitlines()
    assert line.startswith("mini-infer-server: error: ")
    assert all(word in line for word in words), line
    assert told.returncode == code


# --- before anything is loaded ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--foo"], ["--foo"]),
        (["--port", "x"], ["--port", "'x'"]),
        (["--config", "/no/such.toml"], ["/no/such.toml", "No such file"]),
        (["--engine", "replica"], ["engine 'replica' is not in this version; use auto, single, generate"]),
        (["--devices", "cpu,cpu"], ["'cpu' is named twice"]),
    ],
)
def test_a_wrong_setting_is_one_line(argv: list[str], words: list[str]) -> None:
    assert_one_line(run_server(*argv), 2, *words)


def test_an_unknown_key_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[server]\nprot = 1\n")
    assert_one_line(run_server("--config", str(path)), 2, str(path), "prot")
    assert_one_line(run_server(MINI_INFER_CONFIG=str(path)), 2, str(path), "prot")


def test_an_unknown_variable_is_one_line() -> None:
    assert_one_line(run_server(MINI_INFER_BOGUS="1"), 2, "'MINI_INFER_BOGUS'")


@pytest.mark.parametrize("flag", ["--help", "--version", "--foo"])
def test_torch_is_not_loaded_before_the_command_line_is_read(flag: str) -> None:
    program = (
        "import sys; from mini_infer.server.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'grpc_reflection'} & set(sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_is_loaded_ends_at_once_and_quietly(number: int, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    os.mkfifo(file)
    process = subprocess.Popen(
        [sys.executable, "-m", "mini_infer.server", "--config", str(file)], stderr=subprocess.PIPE, text=True
    )
    with file.open("w"):  # waits until the server reads its file
        process.send_signal(number)
        assert (process.communicate(timeout=WAIT_S)[1], process.returncode) == ("", 128 + number)


@pytest.mark.parametrize("redirection", [">&- 2>&-", ">/dev/full 2>/dev/full", ""])
def test_nobody_has_to_hear_what_a_server_says(redirection: str) -> None:
    reader, broken = os.pipe()
    os.close(reader)
    program = (
        "import os; from mini_infer.server.run import complain, open_closed_streams, say\n"
        "open_closed_streams(); say('serving'); complain(RuntimeError('no')); os._exit(7)"
    )
    words = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program]
    told = subprocess.run(words, stdout=broken, stderr=broken, timeout=WAIT_S, check=False)
    assert told.returncode == 7
    os.close(broken)


# --- packages that are not there ----------------------------------------------------------------------------------

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r} or name in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
from mini_infer.server.__main__ import main
main()
"""


def run_without(*missing: str) -> subprocess.CompletedProcess[str]:
    program = WITHOUT.format(missing=missing)
    words = [sys.executable, "-c", program, *TINY, "--port", "0"]
    return subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)


LIGHT = ("accelerate", "gguf", "grpc_reflection", "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers")


@pytest.mark.parametrize("missing", [(*LIGHT, "torch", "transformers"), ("torch",), ("transformers",), ("jinja2",)])
def test_a_server_without_its_packages_says_how_to_get_them(missing: tuple[str, ...]) -> None:
    told = run_without(*missing)
    assert_one_line(told, 1, "pip install 'mini-infer[server]'", "No module named")
    assert any(repr(name) in told.stderr for name in missing)


def test_a_module_of_ours_that_is_missing_is_a_fault_and_shows() -> None:
    told = run_without("mini_infer.server.app")
    assert "Traceback" in told.stderr
    assert told.returncode == 1


# --- loads that fail ----------------------------------------------------------------------------------------------


def test_an_absent_device_is_one_line() -> None:
    told = run_server("--port", "0", "--devices", "cuda:0", CUDA_VISIBLE_DEVICES="")
    assert_one_line(told, 1, "cuda:0", "torch sees 0")


def test_an_absent_model_is_one_line() -> None:
    told = run_server("--port", "0", "--model", "/no/such/folder", "--devices", "cpu")
    assert_one_line(told, 1, "/no/such/folder")
    assert "serving on" not in told.stdout


def test_a_truncated_model_is_one_line(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "vocab_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
    told = run_server("--port", "0", "--model", str(tmp_path), "--devices", "cpu")
    assert_one_line(told, 1, str(tmp_path))
    assert "serving on" not in told.stdout


# --- the real server ----------------------------------------------------------------------------------------------


def test_a_server_tells_its_decisions_serves_and_keeps_its_port() -> None:
    with running_server(*TINY) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(prompt="Hello", stop=pb.StopConditions(max_new_tokens=4, ignore_eos=True))
            answer = stub.Generate(request, timeout=WAIT_S)
            assert answer.finished.usage.completion_tokens == 4
            assert answer.finished.engine.kind == pb.ENGINE_KIND_REPLICA
        second = run_server(*TINY, "--port", server.address.rpartition(":")[2])
        assert_one_line(second, 1, server.address, "in use")
        assert server.stop(WAIT_S) == 0


# --- signals ------------------------------------------------------------------------------------------------------


class Process:
    """The server's process over a scripted engine, with its lines as they come."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""

    async def line(self, words: str) -> str:
        """The last word of the next line that holds some words."""
        async with asyncio.timeout(WAIT_S):
            while words not in (line := (await self.process.stdout.readline()).decode()):
                assert line, f"ended without {words!r}"
        return line.split()[-1]

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def exit_code(self, timeout_s: float) -> int:
        return await asyncio.wait_for(self.process.wait(), timeout_s)


@asynccontextmanager
async def scripted(**settings: object) -> AsyncIterator[Process]:
    words = [scripted_server.__file__, json.dumps(settings)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        server = Process(process)
        server.address = await server.line("listening on")
        yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def stub_of(channel: grpc.aio.Channel) -> generation_pb2_grpc.GenerationServiceStub:
    return generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: int) -> None:
    async with scripted(tokens=["a"] * 20, step_s=0.05) as server, grpc.aio.insecure_channel(server.address) as channel:
        await server.line("serving on")
        call = stub_of(channel).GenerateStream(pb.GenerateRequest(prompt="x"))
        await call.read()
        server.signal(number)
        told = await outcome(call)
        assert told.code is grpc.StatusCode.OK
        assert told.responses[-1].finished.reason == pb.FINISH_REASON_EOS
        assert await server.exit_code(WAIT_S) == 0


async def test_a_drain_ends_within_its_grace_whatever_clients_do() -> None:
    """A long stream, an open health watch and a reader that does not read."""
    grace_s = 2
    async with (
        scripted(tokens=["x" * 20_000], repeat=True, step_s=0.01, grace_s=grace_s) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        await server.line("serving on")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        request = pb.GenerateRequest(prompt="x", stop=pb.StopConditions(max_new_tokens=4000))
        silent = stub_of(channel).GenerateStream(request)
        await silent.initial_metadata()
        reading = stub_of(channel).GenerateStream(request)
        await reading.read()
        server.signal()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        late = await outcome(stub_of(channel).GenerateStream(request))
        assert (late.code, late.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        told = await outcome(reading)
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert await server.exit_code(grace_s + 10) == 0  # alone, its streams take 40 s
        assert await watch.read() is grpc.aio.EOF


async def test_a_second_signal_ends_at_once() -> None:
    async with (
        scripted(tokens=["a"], repeat=True, step_s=0.05, grace_s=60) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        await server.line("serving on")
        call = stub_of(channel).GenerateStream(pb.GenerateRequest(prompt="x"))
        await call.read()
        server.signal()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass
        server.signal()  # at the same moment: still the first
        await asyncio.sleep(2 * ONE_SIGNAL_S)
        assert (await call.read()).HasField("delta")
        server.signal()
        assert await server.exit_code(20) not in (0, None)  # far below the grace
        assert (await outcome(call)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_signal_during_the_load_ends_well() -> None:
    async with scripted(load_s=300) as server:
        server.signal()
        assert await server.exit_code(WAIT_S) == 0  # far below the load


async def test_health_answers_during_the_load() -> None:
    async with scripted(load_s=300) as server, grpc.aio.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name, status in (("", 2), ("mini_infer.live", 1)):
            assert (await check(health_pb2.HealthCheckRequest(service=name))).status == status


def test_the_lines_that_others_read() -> None:
    pattern = re.compile(r"mini-infer-server: (listening|serving) on (127\.0\.0\.1:\d+)")
    process = subprocess.Popen(
        [sys.executable, scripted_server.__file__, "{}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if "serving" in line:
                break
        found = [match.groups() for line in lines if (match := pattern.fullmatch(line))]
        assert [word for word, _ in found] == ["listening", "serving"]
        assert len({address for _, address in found}) == 1
    finally:
        process.kill()
        process.communicate()
