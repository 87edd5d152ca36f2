"""`mini-infer` in general: probes, tables, wrong calls, and what it imports."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest
from support.command import mini_infer, start
from support.serving import serving
from support.unruly_server import polite, unruly_server

from mini_infer.engines.scripted_engine import ScriptedEngine

FOREIGN = {"torch", "transformers", "numpy", "mini_infer.engines", "mini_infer.server"}


async def test_health_in_every_state():
    async with serving(ScriptedEngine(load_s=3600), wait_ready=False) as served:
        loading = await mini_infer("health", address=served.address)
        alive = await mini_infer("health", "--service", "mini_infer.live", address=served.address)
    assert (loading.status, loading.stdout) == (1, "NOT_SERVING\n")
    assert (alive.status, alive.stdout, alive.stderr) == (0, "SERVING\n", "")
    async with serving() as served:
        ready = await mini_infer("health", address=served.address)
        unknown = await mini_infer("health", "--service", "nobody", address=served.address)
        flag = await mini_infer("health", "--address", served.address)
    assert (ready.status, ready.stdout, ready.stderr) == (0, "SERVING\n", "")
    assert (unknown.status, unknown.stdout) == (1, "SERVICE_UNKNOWN\n")
    assert flag.status == 0
    gone = await mini_infer("health", address=served.address)
    assert gone.status == 1
    assert served.address in gone.error


async def test_health_of_a_server_that_does_not_answer():
    async def hold(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        done = await mini_infer("health", "--timeout", "0.3", address=f"127.0.0.1:{port}")
    assert done.status == 1
    assert done.error.startswith("error: ")


async def test_health_watch_shows_every_change():
    async with unruly_server(polite) as server:
        await server.health.set("", 2)
        process = await start("health", "--watch", address=server.address)
        assert await process.stdout.readline() == b"NOT_SERVING\n"
        await server.health.set("", 1)
        assert await process.stdout.readline() == b"SERVING\n"
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 130
        timed = await mini_infer("health", "--watch", "--timeout", "0.5", address=server.address)
        assert (timed.status, timed.stdout) == (0, "SERVING\n")


async def test_engines_and_models():
    async with serving(ScriptedEngine("scripted/0", max_running=3), ScriptedEngine("scripted/1")) as served:
        table = await mini_infer("engines", address=served.address)
        header, first, second = table.stdout.splitlines()
        assert header.split() == ["id", "kind", "devices", "model", "state", "running", "waiting", "tokens"]
        assert first.split() == ["scripted/0", "scripted", "cpu", "scripted", "ready", "0/3", "0", "0"]
        assert second.split()[0] == "scripted/1"
        lines = await mini_infer("engines", "--json", address=served.address)
        assert [json.loads(line)["engine_id"] for line in lines.stdout.splitlines()] == ["scripted/0", "scripted/1"]
        table = await mini_infer("models", address=served.address)
        assert table.stdout.splitlines()[1].split()[:3] == ["scripted", "scripted", "4096"]
        (model,) = (await mini_infer("models", "--json", address=served.address)).stdout.splitlines()
        assert json.loads(model)["engine_ids"] == ["scripted/0", "scripted/1"]


@pytest.mark.parametrize(
    "arguments",
    [("engines", "--watch"), ("nothing",), ("generate", "--top-p", "x", "Hi"), ("generate", "a", "b"), ("--wat",)],
)
async def test_a_wrong_call_exits_2(arguments):
    done = await mini_infer(*arguments)
    assert (done.status, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


async def test_help_lists_the_commands():
    done = await mini_infer("--help")
    assert done.status == 0
    for command in ("generate", "chat", "health", "engines", "models"):
        assert command in done.stdout
    assert (await mini_infer("--version")).stdout.startswith("mini-infer ")


@pytest.mark.parametrize("module", ["mini_infer.client", "mini_infer.client.cli.app", "mini_infer.client.cli.chat"])
def test_nothing_heavy_is_imported(module):
    code = f"import sys, {module}; print(*sorted({FOREIGN!r} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def test_the_command_line_is_no_part_of_the_library():
    code = "import sys, mini_infer.client; print(*(name for name in ('typer', 'rich') if name in sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []
