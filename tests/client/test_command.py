"""`mini-infer` as people and scripts call it: a process of its own, judged by its outputs and its exit status."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import pytest
from support.command import mini_infer, on_terminal, start
from support.serving import serving
from support.unruly_server import accept, answer, delta, finished, polite, started, unruly_server

from mini_infer.engines.errors import LoadError
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.v1 import admin_pb2
from mini_infer.v1 import generation_pb2 as pb

FOREIGN = {"torch", "transformers", "numpy", "mini_infer.engines", "mini_infer.server"}


# --- generate -----------------------------------------------------------------------------------------------------


async def test_text_goes_to_stdout_and_one_summary_line_to_stderr():
    async with serving() as served:
        done = await mini_infer("generate", "Hello  wörld", address=served.address)
    assert (done.status, done.stdout) == (0, "Hello  wörld")
    assert done.error.startswith("TTFT ")
    assert " ms, 3 tokens, " in done.error
    assert done.error.endswith("tokens/s, engine scripted/0, finished: eos")


async def test_text_is_written_as_it_is_made():
    gate = Gate(1)
    async with serving(ScriptedEngine(scripts=Script(tokens=["first", " second"], gate=gate))) as served:
        process = await start("generate", "Hi", address=served.address)
        assert await process.stdout.readexactly(5) == b"first"
        gate.open()
        assert await process.stdout.read() == b" second"
        await process.communicate()
        assert process.returncode == 0


@pytest.mark.parametrize("arguments", [(), ("-",)])
async def test_the_prompt_comes_through_a_pipe(arguments):
    async with serving() as served:
        done = await mini_infer("generate", *arguments, address=served.address, stdin="two  wörds\n\n".encode())
    assert (done.status, done.stdout) == (0, "two  wörds\n")


async def test_an_argument_goes_before_a_pipe():
    async with serving() as served:
        done = await mini_infer("generate", "argument", address=served.address, stdin=b"pipe")
    assert done.stdout == "argument"


async def test_a_pipe_that_is_not_utf8_is_a_usage_error():
    done = await mini_infer("generate", stdin=b"caf\xe9")
    assert (done.status, done.error) == (2, "error: the prompt on standard input is not UTF-8 (byte 3)")


async def test_an_argument_that_is_not_utf8_names_the_field():
    done = await mini_infer("generate", "caf\udce9")
    assert done.status == 1
    assert done.error.startswith("error: prompt: cannot be 'caf\\udce9'")


async def test_flags_reach_the_request():
    async with unruly_server(polite) as server:
        flags = "--model m --temperature 0 --top-p 0.5 --top-k 0 --min-p 0.1 --seed 7 --max-new-tokens 3 --stop a --stop b"
        more = "--stop-token-id 5 --ignore-eos --max-queue 2.5 --engine-id tiny/0 --session-id s --request-id mine"
        hidden = "--show-special-tokens --logprobs --top-logprobs 2 --output-token-ids --include-stop-string"
        words = f"{flags} {more} {hidden} --system S".split()
        done = await mini_infer("generate", "Hi", *words, address=server.address)
        assert (done.status, done.stdout) == (0, "Hello world")
        (request,) = server.requests
    assert [(said.role, said.content) for said in request.chat.messages] == [("system", "S"), ("user", "Hi")]
    assert (request.model, request.request_id, request.placement.engine_id) == ("m", "mine", "tiny/0")
    assert (request.sampling.HasField("temperature"), request.sampling.HasField("top_k")) == (True, True)
    assert (request.sampling.seed, request.stop.max_new_tokens, request.sampling.top_p) == (7, 3, 0.5)
    assert (list(request.stop.strings), list(request.stop.token_ids)) == (["a", "b"], [5])
    assert request.max_queue_duration.ToMilliseconds() == 2500
    assert (request.output.skip_special_tokens, request.output.top_logprobs) == (False, 2)


async def test_flags_that_are_not_given_are_not_sent():
    async with unruly_server(polite) as server:
        await mini_infer("generate", "Hi", address=server.address)
        (request,) = server.requests
    assert [field.name for field, _ in request.ListFields()] == ["prompt"]


async def test_json_lines():
    async with serving() as served:
        done = await mini_infer("generate", "--json", "--logprobs", "Hello wörld", address=served.address)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", "delta", "delta", "delta", "finished"]
    assert "".join(event["text"] for event in events[1:-1]) == events[-1]["text"] == "Hello wörld"
    assert events[1]["first_token"]["time_to_first_token_s"] > 0
    assert bytes(events[2]["logprobs"][0]["token"]).decode() == " wörld"
    assert events[-1]["timing"]["total_s"] > 0


async def test_a_failure_in_json_lines_too():
    script = Script(tokens=["a"], fail_at=2)
    async with serving(ScriptedEngine(scripts=script)) as served:
        done = await mini_infer("generate", "--json", "Hi", address=served.address)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.status, last["event"], last["reason"], last["generated_tokens"]) == (1, "error", "STREAM_FAILED", 1)
    assert done.error.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--top-p", "7", "Hi"), "error: sampling.top_p: "),
        (("--model", "nobody", "Hi"), "[MODEL_NOT_FOUND] - `mini-infer models`"),
        (("--engine-id", "nobody", "Hi"), "[ENGINE_NOT_FOUND] - `mini-infer engines`"),
        (("--engine-kind", "warp", "Hi"), "error: placement.engine_kind: "),
        (("--max-new-tokens", "-1", "Hi"), "error: stop.max_new_tokens: "),
        (("--stop", "", "Hi"), "error: stop.strings"),
    ],
)
async def test_a_failure_is_one_line_that_names_what_is_wrong(arguments, expected):
    async with serving() as served:
        done = await mini_infer("generate", *arguments, address=served.address)
    assert (done.status, done.stdout) == (1, "")
    assert expected in done.error


async def test_no_server_is_told_with_its_address():
    done = await mini_infer("generate", "Hi", address="127.0.0.1:1")
    assert (done.status, done.stdout) == (1, "")
    assert done.error.endswith("is a server running at 127.0.0.1:1? --address names another")


async def test_a_model_that_still_loads_is_told_with_the_way_to_wait():
    async with serving(ScriptedEngine(load_s=3600), wait_ready=False) as served:
        done = await mini_infer("generate", "Hi", address=served.address)
        assert done.status == 1
        assert "[NO_READY_ENGINE] - `mini-infer generate --wait SECONDS`" in done.error
        done = await mini_infer("generate", "--wait", "0.3", "Hi", address=served.address)
        assert done.status == 1
        assert "scripted/0 is loading" in done.error


async def test_a_failed_load_ends_the_wait():
    async with serving(ScriptedEngine(load_error=LoadError("no such folder")), wait_ready=False) as served:
        done = await mini_infer("generate", "--wait", "60", "Hi", address=served.address)
    assert done.status == 1
    assert "no such folder" in done.error


async def test_a_truncated_answer_fails_after_its_text():
    async def script(server, request, context):
        await accept(context)
        yield started()
        yield delta("half")

    async with unruly_server(script) as server:
        done = await mini_infer("generate", "Hi", address=server.address)
    assert (done.status, done.stdout) == (1, "half")
    assert "cut off" in done.error


async def test_a_server_that_dies_is_one_line_too():
    async with endless() as server:
        process = await start("generate", "Hi", address=server.address)
        assert await process.stdout.readexactly(1) == b"a"
        await server.stop()
        _, stderr = await process.communicate()
    (line,) = stderr.decode().splitlines()
    assert process.returncode == 1
    assert line.startswith("error: ")
    assert "(after 1 token)" in line


async def test_numbers_that_are_none_are_null_in_json():
    async def script(server, request, context):
        await accept(context)
        yield started()
        yield delta("a", logprobs=[pb.TokenLogprob(token_id=1, token=b"a", logprob=float("-inf"))])
        yield finished()

    async with unruly_server(script) as server:
        done = await mini_infer("generate", "--json", "Hi", address=server.address)
    assert done.status == 0
    assert json.loads(done.stdout.splitlines()[1])["logprobs"] == [
        {"token_id": 1, "token": [97], "logprob": None, "top": []}
    ]


async def test_garbage_is_one_line_too():
    async def script(server, request, context):
        yield delta("before its start")

    async with unruly_server(script) as server:
        done = await mini_infer("generate", "Hi", address=server.address)
    assert done.status == 1
    assert "`delta` before `started`" in done.error


async def test_the_timeout_is_kept():
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate()))) as served:
        done = await mini_infer("generate", "--timeout", "0.3", "Hi", address=served.address)
    assert done.status == 1
    assert "DEADLINE_EXCEEDED" in done.error


async def test_ctrl_c_cancels_at_the_server_and_exits_130():
    async with endless() as server:
        process = await start("generate", "Hi", address=server.address)
        assert await process.stdout.readexactly(1) == b"a"
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
        await asyncio.wait_for(server.cancelled.wait(), 10)
    assert (process.returncode, stdout, stderr) == (130, b"", b"interrupted\n")


async def test_a_reader_that_leaves_ends_it_quietly_and_at_the_server():
    script = Script(tokens=["word "], repeat=True, step_s=0.01)
    async with serving(ScriptedEngine(scripts=script)) as served:
        line = f"'{sys.executable}' -m mini_infer.client generate Hi --address {served.address} | head -c 4"
        process = await asyncio.create_subprocess_shell(
            line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert await process.communicate() == (b"word", b"")
        while (await served.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines[0].num_running:
            await asyncio.sleep(0.01)


async def test_a_full_disk_is_told():
    async with serving() as served:
        with open("/dev/full", "w") as full:  # noqa: ASYNC230, PTH123
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mini_infer.client", "generate", "Hi", "--address", served.address),
                stdout=full,
                stderr=asyncio.subprocess.PIPE,
            )
            _, stderr = await process.communicate()
    assert (process.returncode, stderr) == (1, b"error: [Errno 28] No space left on device\n")


async def test_an_encoding_without_the_character_is_no_failure():
    async with serving() as served:
        done = await mini_infer("generate", "wörld", address=served.address, PYTHONIOENCODING="ascii")
    assert (done.status, done.stdout) == (0, "w?rld")


# --- on a terminal ------------------------------------------------------------------------------------------------


async def test_a_terminal_is_told_what_is_waited_for():
    gate, load = Gate(), threading.Event()
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=gate), load_gate=load)
    async with serving(engine, wait_ready=False) as served:
        async with on_terminal("generate", "--wait", "60", "1", address=served.address) as first:
            await first.until("waiting for the model: scripted/0 (loading)")
            load.set()
            await first.until("reading 1 tokens on engine scripted/0")
            async with on_terminal("generate", "2", address=served.address) as second:
                await second.until("waiting in the queue")
                gate.open()
                assert "finished: eos" in await first.rest()
                shown = await second.rest()
                assert "a\r\n" in shown
                assert "finished: eos" in shown


async def test_no_color_means_no_color():
    async with serving() as served:
        async with on_terminal("generate", "Hi", address=served.address) as terminal:
            shown = await terminal.rest()
            assert "\x1b[32m" in shown
            assert "\x1b[2mTTFT" in shown
        async with on_terminal("generate", "Hi", address=served.address, NO_COLOR="1") as terminal:
            assert "\x1b[3" not in await terminal.rest()


async def test_a_terminal_is_not_steered_by_the_model():
    async def script(server, request, context):
        async for event in answer("a\x1b[2Jb\x9b1mc\nd\te"):
            yield event

    async with unruly_server(script) as server:
        async with on_terminal("generate", "Hi", address=server.address, TERM="dumb") as terminal:
            shown = await terminal.rest()
        assert "a\ufffd[2Jb\ufffd1mc\r\nd\te\r\n" in shown
        piped = await mini_infer("generate", "Hi", address=server.address)
        assert piped.stdout == "a\x1b[2Jb\x9b1mc\nd\te"


async def test_without_a_prompt_a_terminal_gets_a_usage_error():
    async with on_terminal("generate", address="127.0.0.1:1") as terminal:
        assert "error: give a prompt" in await terminal.rest()
        assert terminal.process.returncode == 2


# --- chat ---------------------------------------------------------------------------------------------------------


async def test_a_conversation_on_a_terminal():
    async def script(server, request, context):
        await accept(context)
        said = request.chat.messages[-1].content
        if said == "long":
            yield started()
            yield delta("an endless")
            server.reached.set()
            await server.gate.wait()
        if said == "bad":
            yield delta("before its start")
        async for event in answer(f"you said {said}"):
            yield event

    async with unruly_server(script) as server:
        async with on_terminal("chat", "--system", "Be nice", address=server.address) as terminal:
            for line in ("one", "bad", "long"):
                await terminal.until("> ")
                terminal.type(f"{line}\n")
                if line == "one":
                    assert "you said one" in await terminal.until("finished: eos")
                elif line == "bad":
                    await terminal.until("error: the server sent `delta` before `started`")
            await terminal.until("an endless")
            terminal.process.send_signal(signal.SIGINT)
            await terminal.until("TTFT 7 ms, 1 token, cancelled; this turn is forgotten")
            await asyncio.wait_for(server.cancelled.wait(), 10)
            await terminal.until("> ")
            await terminal.interrupt_until("Ctrl-D or /exit leaves")
            await terminal.until("> ")
            terminal.type("two\n")
            await terminal.until("you said two")
            await terminal.until("> ")
            terminal.type("/reset\n")
            await terminal.until("> ")
            terminal.type("three\n")
            await terminal.until("you said three")
            await terminal.until("> ")
            terminal.type("\x04")
            await terminal.rest()
            assert terminal.process.returncode == 0
    asked = [[(said.role, said.content) for said in request.chat.messages] for request in server.requests]
    system, one = ("system", "Be nice"), [("user", "one"), ("assistant", "you said one")]
    assert asked == [
        [system, ("user", "one")],
        [system, *one, ("user", "bad")],
        [system, *one, ("user", "long")],
        [system, *one, ("user", "two")],
        [system, ("user", "three")],
    ]


async def test_a_conversation_through_a_pipe():
    async with serving() as served:
        done = await mini_infer("chat", address=served.address, stdin=b"Hello\n\n/exit\nnever\n")
        assert (done.status, done.stdout.count("Hello")) == (0, 1)
        done = await mini_infer("chat", "--top-p", "7", address=served.address, stdin=b"Hello\n")
        assert (done.status, "sampling.top_p" in done.error) == (1, True)


# --- the rest -----------------------------------------------------------------------------------------------------


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


def endless():
    """A server that says "a" and then nothing more."""

    async def script(server, request, context):
        await accept(context)
        yield started()
        yield delta("a")
        await server.gate.wait()

    return unruly_server(script)
