"""`mini-infer` on a pseudo-terminal, as a person sees it, and its conversations."""

import asyncio
import signal
import threading

import grpc
from support.command import mini_infer, on_terminal
from support.serving import serving
from support.unruly_server import accept, answer, delta, refuse, started, unruly_server

from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine


async def test_a_terminal_is_told_what_is_waited_for():
    gate, load = Gate(), threading.Event()
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=gate), load_gate=load)
    async with (
        serving(engine, wait_ready=False) as served,
        on_terminal("generate", "--wait", "60", "1", address=served.address) as first,
    ):
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
        assert piped.stdout == "a\x1b[2Jb\x9b1mc\nd\te\n"


async def test_a_terminal_is_told_of_another_attempt_and_why():
    async def script(server, request, context):
        if server.attempt == 1:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "too many", retry_after_s=1.0)
        await accept(context)
        async for event in answer("Hello"):
            yield event

    for command in (("generate", "Hi"), ("chat",)):
        async with (
            unruly_server(script) as server,
            on_terminal(*command, address=server.address, COLUMNS="200") as terminal,
        ):
            if command == ("chat",):
                await terminal.until("> ")
                terminal.type("Hi\n")
            await terminal.until("trying again (attempt 2, after a wait of 1.")
            await terminal.until(" s): too many")
            await terminal.until("attempt 2 after 1.")


async def test_a_conversation_has_help():
    async with on_terminal("chat", address="127.0.0.1:1") as terminal:
        await terminal.until("> ")
        terminal.type("/help\n")
        assert "/reset begins anew, /exit or Ctrl-D leaves" in await terminal.until("Ctrl-C stops an answer")
        await terminal.until("> ")
        terminal.type("/wat\n")
        await terminal.until("no command /wat; /help shows what there is")


async def test_without_a_prompt_a_terminal_gets_a_usage_error():
    async with on_terminal("generate", address="127.0.0.1:1") as terminal:
        assert "error: give a prompt" in await terminal.rest()
        assert terminal.process.returncode == 2


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

    async with (
        unruly_server(script) as server,
        on_terminal("chat", "--system", "Be nice", address=server.address) as terminal,
    ):
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
        assert (done.status, done.stdout.count("Hello"), done.stdout[-1]) == (0, 1, "\n")
        done = await mini_infer("chat", "--top-p", "7", address=served.address, stdin=b"Hello\n")
        assert (done.status, "sampling.top_p" in done.error) == (1, True)
