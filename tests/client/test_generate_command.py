"""`mini-infer generate` in pipes: judged by its outputs, its exit status and what the server saw."""

import asyncio
import json
import os
import re
import signal
import sys

import pytest
from grpc import StatusCode
from support.command import mini_infer, start
from support.serving import serving
from support.unruly_server import accept, delta, endless_server, finished, polite, refuse, started, unruly_server

from mini_infer.engines.errors import LoadError
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.v1 import admin_pb2
from mini_infer.v1 import generation_pb2 as pb

RESOURCE_EXHAUSTED = StatusCode.RESOURCE_EXHAUSTED


async def test_text_goes_to_stdout_and_one_summary_line_to_stderr():
    async with serving() as served:
        done = await mini_infer("generate", "Hello  wörld", address=served.address)
    assert (done.status, done.stdout) == (0, "Hello  wörld\n")
    assert done.error.startswith("TTFT ")
    assert " ms, 3 tokens, " in done.error
    assert done.error.endswith("tokens/s, engine scripted/0, finished: eos")


async def test_text_is_written_as_it_is_made():
    gate = Gate(1)
    async with serving(ScriptedEngine(scripts=Script(tokens=["first", " second"], gate=gate))) as served:
        process = await start("generate", "Hi", address=served.address)
        assert await process.stdout.readexactly(5) == b"first"
        gate.open()
        assert await process.stdout.read() == b" second\n"
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
    assert done.stdout == "argument\n"


async def test_a_pipe_that_is_not_utf8_is_a_usage_error():
    done = await mini_infer("generate", stdin=b"caf\xe9")
    assert (done.status, done.error) == (2, "error: the prompt on standard input is not UTF-8 (byte 3)")


async def test_an_argument_that_is_not_utf8_names_the_field():
    done = await mini_infer("generate", "caf\udce9")
    assert done.status == 1
    assert done.error.startswith("error: prompt: cannot be 'caf\\udce9'")


async def test_flags_reach_the_request():
    async with unruly_server(polite) as server:
        flags = "--model m --temperature 0 --top-p 0.5 --top-k 0 --min-p 0.1 --seed 7 --max-new-tokens 3"
        more = "--stop a --stop b --stop-token-id 5 --ignore-eos --max-queue-duration 2.5 --engine-id tiny/0"
        hidden = "--json --session-id s --request-id mine --show-special-tokens --logprobs --top-logprobs 2"
        words = f"{flags} {more} {hidden} --output-token-ids --include-stop-string --system S".split()
        done = await mini_infer("generate", "Hi", *words, address=server.address)
        assert (done.status, done.stdout.count('"event": "delta"')) == (0, 2)
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


async def test_a_value_that_is_not_even_sent_is_a_json_line_too():
    done = await mini_infer("generate", "--json", "--seed", "-1", "Hi")
    (event,) = map(json.loads, done.stdout.splitlines())
    assert (done.status, event["event"], event["fields"]) == (1, "error", ["sampling.seed"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--top-p", "7", "Hi"), "error: sampling.top_p: "),
        (("--model", "nobody", "Hi"), "[MODEL_NOT_FOUND] - `mini-infer models`"),
        (("--engine-id", "nobody", "Hi"), "[ENGINE_NOT_FOUND] - `mini-infer engines`"),
        (
            ("--engine-kind", "warp", "Hi"),
            "error: placement.engine_kind: cannot be 'warp': the kinds are generate, replica, pipeline, scripted [",
        ),
        (("--max-new-tokens", "-1", "Hi"), "error: stop.max_new_tokens: "),
        (("--stop", "", "Hi"), "error: stop.strings"),
        (("--address", "\udcff:1", "Hi"), "error: '\\udcff:1' is no address"),
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
    assert done.error.startswith("error: no server at 127.0.0.1:1 (connection refused) [UNAVAILABLE]")
    assert done.error.endswith("is it running? --address names another")


async def test_a_model_that_still_loads_is_told_with_the_way_to_wait():
    async with serving(ScriptedEngine(load_s=3600), wait_ready=False) as served:
        done = await mini_infer("generate", "Hi", address=served.address)
        assert done.status == 1
        assert "[NO_READY_ENGINE] (after 3 attempts) - `mini-infer generate --wait SECONDS`" in done.error
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
    assert (done.status, done.stdout) == (1, "half\n")
    assert "cut off" in done.error


async def test_a_server_that_dies_is_one_line_too():
    async with endless_server() as server:
        process = await start("generate", "Hi", address=server.address)
        assert await process.stdout.readexactly(1) == b"a"
        await server.stop()
        _, stderr = await process.communicate()
    (line,) = stderr.decode().splitlines()
    assert process.returncode == 1
    assert line.startswith(f"error: the connection to {server.address} broke (")
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
    async with endless_server() as server:
        done = await mini_infer("generate", "--timeout", "2", "Hi", address=server.address)
    assert (done.status, done.stdout) == (1, "a\n")
    assert done.error == "error: the deadline passed [DEADLINE_EXCEEDED] (after 1 token)"


def busy_once(*texts, **fields):
    """A server whose queue takes the second attempt only, and then answers with the texts."""

    async def script(server, request, context):
        if server.attempt == 1:
            await refuse(context, RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", "waited too long", retry_after_s=0.3)
        await accept(context)
        yield started()
        for number, text in enumerate(texts, start=1):
            yield delta(text, number)
        yield finished(len(texts), **fields)

    return unruly_server(script)


async def test_a_second_attempt_is_told_with_the_time_before_it():
    async with busy_once("a") as server:
        done = await mini_infer("generate", "Hi", address=server.address)
    assert (done.status, done.stdout) == (0, "a\n")
    assert re.search(r"finished: eos, attempt 2 after \d\.\d s$", done.error)
    async with busy_once("a") as server:
        done = await mini_infer("generate", "--json", "Hi", address=server.address)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["num_attempts"] == 2
    assert last["retries_s"] > 0.3


@pytest.mark.parametrize("flags", [("--max-attempts", "1"), ("--max-queue-duration", "0")])
async def test_who_does_not_want_to_wait_is_refused_at_once(flags):
    async with busy_once("a") as server:
        done = await mini_infer("generate", *flags, "Hi", address=server.address)
        assert (done.status, done.stdout, server.attempt) == (1, "", 1)
        assert done.error == "error: waited too long [QUEUE_TIMEOUT] - the server is busy; try again later"
    async with busy_once("a") as server:
        done = await mini_infer("chat", *flags, address=server.address, stdin=b"Hi\n")
        assert (done.status, server.attempt) == (1, 1)


async def test_a_seed_that_was_drawn_is_told():
    async def script(server, request, context):
        await accept(context)
        yield started()
        yield delta("a\n")
        yield finished(seed=7)

    async with unruly_server(script) as server:
        done = await mini_infer("generate", "Hi", address=server.address)
    assert done.stdout == "a\n"
    assert done.error.endswith("finished: eos, seed 7")


@pytest.mark.parametrize("flag", ["--logprobs", "--output-token-ids"])
@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",)])
async def test_what_only_json_can_show_needs_it(command, flag):
    done = await mini_infer(*command, flag)
    assert (done.status, done.stdout) == (2, "")
    assert done.error.startswith(f"error: {flag} needs `mini-infer generate --json`")


async def test_ctrl_c_cancels_at_the_server_and_exits_130():
    async with endless_server() as server:
        process = await start("generate", "Hi", address=server.address)
        assert await process.stdout.readexactly(1) == b"a"
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
        await asyncio.wait_for(server.cancelled.wait(), 10)
    assert (process.returncode, stdout, stderr) == (130, b"\n", b"interrupted\n")


async def test_a_reader_that_leaves_ends_it_quietly_and_at_the_server():
    script = Script(tokens=["word "], repeat=True, step_s=0.01)
    async with serving(ScriptedEngine(scripts=script)) as served:
        line = f"'{sys.executable}' -m mini_infer.client generate Hi --address {served.address} | head -c 4"
        process = await asyncio.create_subprocess_shell(
            line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert await process.communicate() == (b"word", b"")
        while (await served.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines[0].num_running:  # noqa: ASYNC110
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


@pytest.mark.parametrize(
    ("command", "status", "texts"),
    [
        ("generate Hi >&-", 0, ("", "TTFT")),
        ("generate Hi >&- 2>&- <&-", 0, ("", "")),
        ("generate Hi 2>/dev/full", 0, ("Hi\n", "")),
        ("engines >&-", 0, ("", "")),
        ("chat <&-", 0, ("", "")),
        ("chat >&- <<< Hi", 0, ("", "TTFT")),
        ("health 2>&-", 0, ("SERVING\n", "")),
    ],
)
async def test_streams_that_are_closed_or_full(command, status, texts):
    async with serving() as served:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"'{sys.executable}' -m mini_infer.client {command}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "MINI_INFER_ADDRESS": served.address},
        )
        stdout, stderr = await process.communicate()
    assert (process.returncode, stdout.decode(), stderr.decode()[:4]) == (status, *texts)


async def test_an_encoding_without_the_character_is_no_failure():
    async with serving() as served:
        done = await mini_infer("generate", "wörld", address=served.address, PYTHONIOENCODING="ascii")
    assert (done.status, done.stdout) == (0, "w?rld\n")
