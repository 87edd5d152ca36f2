"""Where a stream's time went: each part grows alone, and together they are the time to first token exactly."""

from __future__ import annotations

import asyncio

import pytest
from support.dispatching import make_call, make_pool, placed, read, rest, serving

from mini_infer.engines.scripted_engine import Script, ScriptedEngine
from mini_infer.engines.scripted_text import ScriptedText
from mini_infer.server.call import Timing

DELAY_S = 0.3
NUM_TRIES = 5


async def timing_with(*, tokenize_s: float = 0.0, queue_s: float = 0.0, prefill_s: float = 0.0) -> Timing:
    scripts = {"first": Script(tokens=["a"], prefill_s=queue_s), "second": Script(tokens=["a"], prefill_s=prefill_s)}
    text = ScriptedText(prepare_s=tokenize_s)
    async with serving(make_pool(ScriptedEngine(scripts=scripts, text=text))) as dispatcher:
        readers = []
        if queue_s:
            first = dispatcher.enter(make_call("first"))
            await placed(first)
            readers.append(asyncio.create_task(rest(first)))
        stream = dispatcher.enter(make_call("second"))
        await read(stream)
        await asyncio.gather(*readers)
        return stream.timing


@pytest.mark.parametrize("part", ["tokenize", "queue", "prefill"])
async def test_a_delay_grows_only_its_own_part(part: str) -> None:
    """A busy machine may stretch the other parts too, so one calm try of several is enough for them."""
    calm = False
    for _ in range(NUM_TRIES):
        timing = await timing_with(**{f"{part}_s": DELAY_S})
        parts = {name: getattr(timing, f"{name}_ns") / 1e9 for name in ("tokenize", "queue", "prefill")}
        assert parts[part] >= DELAY_S * 0.9
        assert timing.tokenize_ns + timing.queue_ns + timing.prefill_ns == timing.time_to_first_token_ns  # type: ignore[operator]
        if calm := all(seconds < DELAY_S / 2 for name, seconds in parts.items() if name != part):
            break
    assert calm, parts


async def test_the_parts_add_up_while_the_stream_runs() -> None:
    async with serving(make_pool(ScriptedEngine(scripts=Script(tokens=["a", "b"])))) as dispatcher:
        async with dispatcher.enter(make_call()) as stream:
            await stream.prepare()
            assert stream.timing.tokenize_ns is not None
            async for _ in stream:
                timing = stream.timing
                assert timing.tokenize_ns is not None
                assert timing.queue_ns is not None
                if timing.prefill_ns is not None:
                    assert timing.tokenize_ns + timing.queue_ns + timing.prefill_ns == timing.time_to_first_token_ns
        assert stream.timing.total_ns >= stream.timing.time_to_first_text_ns >= stream.timing.time_to_first_token_ns  # type: ignore[operator]
