"""A client that opens a stream and does not read: its neighbours go on, what it is owed waits for it, no more."""

import asyncio
import gc
from typing import Any

import grpc
import psutil
import pytest
from support.serving import Served, serving

from mini_infer.engines.scripted_engine import Script, ScriptedEngine
from mini_infer.engines.scripted_text import ScriptedText
from mini_infer.v1 import generation_pb2 as pb

BIG_TOKEN = "All work and no play makes one dull token. " * 48  # about 2 KB
NEIGHBOURS = [f"neighbour {number}" for number in range(4)]
MEMORY_FACTOR = 3
"""The answer as Python strings, as messages in gRPC's buffers, and as what the client has taken in unread."""


def engine_of(num_tokens: int) -> ScriptedEngine:
    scripts = {prompt: Script(tokens=["a"], repeat=True) for prompt in NEIGHBOURS}
    scripts["paused"] = Script(tokens=[BIG_TOKEN], repeat=True)
    text = ScriptedText(context_length=num_tokens + 100)
    return ScriptedEngine(scripts=scripts, text=text, max_running=1 + len(NEIGHBOURS))


async def opened(served: Served, prompt: str, num_tokens: int) -> Any:
    stop = pb.StopConditions(max_new_tokens=num_tokens)
    call = served.generation.GenerateStream(pb.GenerateRequest(prompt=prompt, stop=stop))
    assert (await call.read()).HasField("started")
    return call


async def text_of(call: Any) -> str:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    assert responses[-1].finished.reason == pb.FINISH_REASON_MAX_NEW_TOKENS
    return "".join(response.delta.text for response in responses)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_tokens", [2_000, pytest.param(20_000, marks=pytest.mark.full)])
async def test_a_reader_that_pauses_harms_nobody_and_loses_nothing(num_tokens: int) -> None:
    answer_bytes = num_tokens * len(BIG_TOKEN)
    async with serving(engine_of(num_tokens)) as served:
        gc.collect()
        before = psutil.Process().memory_info().rss
        paused = await opened(served, "paused", num_tokens)
        neighbours = [await opened(served, prompt, num_tokens) for prompt in NEIGHBOURS]
        assert await asyncio.gather(*map(text_of, neighbours)) == ["a" * num_tokens] * len(NEIGHBOURS)
        growth_bytes = psutil.Process().memory_info().rss - before
        assert growth_bytes < MEMORY_FACTOR * answer_bytes + 64 * 2**20, f"{growth_bytes} bytes more"
        assert await text_of(paused) == BIG_TOKEN * num_tokens
        await served.idle()
