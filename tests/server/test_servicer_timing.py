"""Time to first token of every stream: in its first delta, in its end, in its trailers, and in the right part."""

import asyncio

import grpc
import pytest
from support.dispatching import GatedText, until
from support.serving import Outcome, outcome, serving

from mini_infer.engines.errors import StreamFailed
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.v1 import generation_pb2 as pb

PARTS = ("tokenize_duration", "queue_duration", "prefill_duration")
DELAY_S = 0.25


def span_s(duration: object) -> float:
    return duration.ToNanoseconds() / 1e9


def parts_s(told: Outcome) -> dict[str, float]:
    timing = told.responses[-1].finished.timing
    return {name: span_s(getattr(timing, name)) for name in PARTS}


def assert_consistent(told: Outcome) -> None:
    first, timing = told.responses[1].delta.first_token, told.responses[-1].finished.timing
    for name in (*PARTS, "time_to_first_token"):
        assert getattr(first, name) == getattr(timing, name)
    total_ns = sum(getattr(timing, name).ToNanoseconds() for name in PARTS)
    assert total_ns == timing.time_to_first_token.ToNanoseconds()
    assert told.responses[0].started.queue_duration == timing.queue_duration
    assert told.responses[1].delta.offset == timing.time_to_first_token
    assert span_s(timing.time_to_first_token) <= span_s(timing.time_to_first_text) <= span_s(timing.total_duration)
    offsets = [each.delta.offset.ToNanoseconds() for each in told.responses[1:-1]]
    assert offsets == sorted(offsets)


def only_grew(told: Outcome, part: str) -> None:
    spans = parts_s(told)
    assert spans.pop(part) >= DELAY_S * 0.9
    assert all(span < DELAY_S * 0.9 for span in spans.values()), spans


async def test_every_stream_tells_where_its_time_went() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=["a", "b", "c"]), max_running=4)) as served:
        calls = [served.generation.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(12)]
        for told in await asyncio.gather(*map(outcome, calls)):
            assert_consistent(told)
            timing = told.responses[-1].finished.timing
            assert timing.tokens_per_second == pytest.approx(3 / span_s(timing.decode_duration), rel=1e-6)
            assert span_s(timing.max_inter_token) >= span_s(timing.mean_inter_token) > 0


async def test_a_slow_tokenizer_lengthens_tokenizing_alone() -> None:
    text = GatedText()
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"]), text=text)) as served:
        asyncio.get_running_loop().call_later(DELAY_S, text.gate.set)
        told = await outcome(served.generation.GenerateStream(pb.GenerateRequest(prompt="x")))
    assert_consistent(told)
    only_grew(told, "tokenize_duration")


async def test_a_busy_engine_lengthens_the_queue_alone() -> None:
    gate = Gate()
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], gate=gate))) as served:
        holder = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await holder.read()
        call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await call.initial_metadata()
        asyncio.get_running_loop().call_later(DELAY_S, gate.open)
        told = await outcome(call)
        await outcome(holder)
    assert_consistent(told)
    only_grew(told, "queue_duration")


async def test_a_long_prompt_lengthens_prefill_alone() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], prefill_s=DELAY_S))) as served:
        told = await outcome(served.generation.GenerateStream(pb.GenerateRequest(prompt="x")))
    assert_consistent(told)
    only_grew(told, "prefill_duration")


async def test_held_back_text_comes_later_than_its_token() -> None:
    gate = Gate(1)
    half = "é".encode()
    async with serving(ScriptedEngine(scripts=Script(tokens=[half[:1], half[1:]], gate=gate))) as served:
        call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await until(lambda: served.engines[0].stats().generated_tokens == 1)
        await asyncio.sleep(0.05)
        gate.open()
        told = await outcome(call)
    timing = told.responses[-1].finished.timing
    assert told.text == "é"
    assert span_s(timing.time_to_first_text) >= span_s(timing.time_to_first_token) + 0.04
    assert told.responses[1].delta.first_token.time_to_first_token == timing.time_to_first_token


async def test_a_failed_stream_tells_it_in_its_trailers() -> None:
    script = Script(tokens=["a", "b"], fail_at=2, error=StreamFailed("not numbers"))
    async with serving(ScriptedEngine(scripts=script)) as served:
        told = await outcome(served.generation.GenerateStream(pb.GenerateRequest(prompt="x")))
    assert told.code is grpc.StatusCode.INTERNAL
    first = told.responses[1].delta.first_token
    assert float(told.trailers["mini-infer-ttft-ms"]) == pytest.approx(
        span_s(first.time_to_first_token) * 1e3, abs=1e-3
    )


async def test_a_stream_without_a_token_claims_no_first_token() -> None:
    script = Script(fail_at=1, error=StreamFailed("not numbers"))
    async with serving(ScriptedEngine(scripts=script)) as served:
        told = await outcome(served.generation.GenerateStream(pb.GenerateRequest(prompt="x")))
    assert "mini-infer-ttft-ms" not in told.trailers
    assert told.trailers["mini-infer-engine-id"] == "scripted/0"
