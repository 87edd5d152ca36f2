"""Clients that leave and deadlines that pass, in every phase of a stream: counts go back to 0, one line is logged."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.dispatching import GatedText, until
from support.serving import Served, log_everything, log_lines, outcome, serving

from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.v1 import generation_pb2 as pb

DEADLINE_S = 1.0  # long beside any pause of a busy machine: the phase must be seen before it passes
PHASES = ["queued", "tokenizing", "prefilling", "decoding"]


class Stage:
    """A server with one slot, and a way to bring a call into one phase and hold it there."""

    def __init__(self, served: Served, gate: Gate, text: GatedText) -> None:
        self.served, self.gate, self.text = served, gate, text
        self.holder: Any = None

    async def call(self, phase: str, method: str, timeout_s: float | None = None) -> Any:
        if phase == "queued":
            self.holder = self.served.generation.GenerateStream(pb.GenerateRequest(prompt="holder"))
            await self.holder.read()
        if phase == "tokenizing":
            self.text.gate.clear()
        call = getattr(self.served.generation, method)(pb.GenerateRequest(prompt=phase), timeout=timeout_s)
        task = asyncio.ensure_future(outcome(call))  # a unary call is sent when it is awaited
        await until(self._reached(phase))
        return call, task

    def _reached(self, phase: str) -> Callable[[], bool]:
        engine = self.served.engines[0]
        return {
            "queued": lambda: self.served.dispatcher.models[0].num_waiting == 1,
            "tokenizing": lambda: self.served.dispatcher.models[0].num_waiting == 1,
            "prefilling": lambda: self.served.dispatcher.engines[0].num_running == 1,
            "decoding": lambda: engine.stats().generated_tokens >= 2,
        }[phase]

    async def settle(self) -> None:
        """What is left is let go; then nothing may be running or waiting."""
        self.text.gate.set()
        if self.holder is not None:
            self.holder.cancel()
        await self.served.idle()


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    gate, text = Gate(), GatedText()
    text.gate.set()

    def script(prepared: Any) -> Script:
        is_decoding = text.detokenize(prepared.prompt_ids) == "decoding"
        return Script(tokens=["a"], repeat=True, gate=Gate(2) if is_decoding else gate)

    async with serving(ScriptedEngine(scripts=script, text=text)) as served:
        yield Stage(served, gate, text)


async def works(served: Served) -> bool:
    """Whether the next caller gets a slot."""
    call = served.generation.GenerateStream(pb.GenerateRequest(prompt="next"))
    started = await asyncio.wait_for(call.read(), 10)
    call.cancel()
    return started.HasField("started")


@pytest.mark.parametrize("method", ["GenerateStream", "Generate"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_frees_its_place(method: str, phase: str, caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    async with stage() as at:
        call, task = await at.call(phase, method)
        call.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: len(log_lines(caplog)) == 1)
        await at.settle()
        assert await works(at.served)
    line = log_lines(caplog)[0]
    assert line["outcome"] == "disconnected"
    assert (line["tokens"] == "0") == (phase != "decoding")
    assert (line["ttft_ms"] == "-") == (phase != "decoding")


@pytest.mark.parametrize("method", ["GenerateStream", "Generate"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_deadline_that_passes_frees_the_place(
    method: str, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_everything(caplog)
    async with stage() as at:
        _, task = await at.call(phase, method, DEADLINE_S)
        told = await task
        assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(log_lines(caplog)) == 1)
        await at.settle()
        assert await works(at.served)
    assert log_lines(caplog)[0]["outcome"] == "DEADLINE_EXCEEDED"


async def test_a_vanished_connection_is_a_cancel(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    async with stage() as at:
        channel = grpc.aio.insecure_channel(at.served.address, options=[("grpc.use_local_subchannel_pool", 1)])
        call = channel.unary_stream("/mini_infer.v1.GenerationService/GenerateStream")(
            pb.GenerateRequest(prompt="decoding").SerializeToString()
        )
        await call.read()
        await channel.close()
        await until(lambda: len(log_lines(caplog)) == 1)
        await at.settle()
    assert log_lines(caplog)[0]["outcome"] == "disconnected"


async def test_a_client_that_leaves_while_its_messages_wait_frees_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """The handler is then inside gRPC's write and not inside the stream."""
    log_everything(caplog)
    gate = Gate()
    big = Script(tokens=["x" * 50_000], repeat=True, gate=gate)
    async with serving(ScriptedEngine(scripts=lambda _: big)) as served:
        call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await call.initial_metadata()
        gate.allow(40)  # 2 MB: far beyond what a connection takes unread
        await until(lambda: served.engines[0].stats().generated_tokens == 40)
        call.cancel()
        await until(lambda: len(log_lines(caplog)) == 1)
        await served.idle()
    assert log_lines(caplog)[0]["outcome"] == "disconnected"


async def test_many_cancels_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    engine = ScriptedEngine(scripts=Script(tokens=["a"], repeat=True), max_running=4)

    async with serving(engine, max_queue=1000) as served:

        async def come_and_go(number: int) -> None:
            call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
            for _ in range(number % 4):
                await call.read()
            call.cancel()

        await asyncio.gather(*(come_and_go(number) for number in range(100)))
        await served.idle()
        assert await works(served)


async def test_a_stream_that_reached_its_end_is_not_a_cancel(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    async with serving() as served:
        call = served.generation.GenerateStream(pb.GenerateRequest(prompt="a b"))
        while not (await call.read()).HasField("finished"):
            pass
        call.cancel()
        await until(lambda: len(log_lines(caplog)) == 1)
    assert log_lines(caplog)[0]["outcome"] == "eos"
