"""Every row of the table of statuses over a real channel: code, reason, trailers, and no header before a refusal."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from support.dispatching import GatedText, until
from support.serving import Outcome, Served, log_everything, log_lines, outcome, serving

from mini_infer.engines.api import Delta
from mini_infer.engines.errors import OutOfMemory, StreamFailed
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.engines.scripted_text import ScriptedText
from mini_infer.v1 import generation_pb2 as pb

Code = grpc.StatusCode


async def stream(served: Served, **fields: Any) -> Outcome:
    return await outcome(served.generation.GenerateStream(pb.GenerateRequest(**{"prompt": "x"} | fields)))


def assert_refused(told: Outcome, code: Code, reason: str) -> None:
    """Refused before anything was sent, so that a retry is possible."""
    assert (told.code, told.reason) == (code, reason)
    assert not told.responses
    assert "mini-infer-request-id" not in told.header
    assert told.trailers["mini-infer-generated-tokens"] == "0"


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("sampling.temperature", {"sampling": pb.SamplingParams(temperature=math.nan)}),
    ("sampling.top_p", {"sampling": pb.SamplingParams(top_p=0)}),
    ("sampling.min_p", {"sampling": pb.SamplingParams(min_p=2)}),
    ("sampling.repetition_penalty", {"sampling": pb.SamplingParams(repetition_penalty=0)}),
    ("sampling.presence_penalty", {"sampling": pb.SamplingParams(presence_penalty=3)}),
    ("sampling.frequency_penalty", {"sampling": pb.SamplingParams(frequency_penalty=-3)}),
    ("sampling.logit_bias[1]", {"sampling": pb.SamplingParams(logit_bias={1: math.inf})}),
    ("stop.max_new_tokens", {"stop": pb.StopConditions(max_new_tokens=0)}),
    ("stop.strings[0]", {"stop": pb.StopConditions(strings=[""])}),
    ("output.top_logprobs", {"output": pb.OutputOptions(top_logprobs=3)}),
    ("placement.priority", {"placement": pb.Placement(priority=1)}),
    ("max_queue_duration", {"max_queue_duration": Duration(seconds=-1)}),
    ("request_id", {"request_id": "x" * 200}),
]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(("field", "fields"), FIELDS, ids=[field for field, _ in FIELDS])
async def test_a_bad_field_is_named(method: str, field: str, fields: dict[str, Any]) -> None:
    async with serving() as served:
        told = await outcome(getattr(served.generation, method)(pb.GenerateRequest(**{"prompt": "x"} | fields)))
        assert_refused(told, Code.INVALID_ARGUMENT, "INVALID_FIELD")
        (violation,) = told.detail(error_details_pb2.BadRequest).field_violations
        assert violation.field == field
        assert told.message == f"{field}: {violation.description}"
        assert "grpc-retry-pushback-ms" not in told.trailers
        assert (await stream(served)).text == "x"


@pytest.mark.parametrize(
    ("field", "reason", "fields"),
    [
        ("prompt", "PROMPT_TOO_LONG", {"prompt": "a" + " a" * 19}),
        ("prompt", "INVALID_FIELD", {"prompt": ""}),
        ("prompt_token_ids.ids", "INVALID_FIELD", {"prompt": None, "prompt_token_ids": pb.TokenIds(ids=[300])}),
        ("stop.token_ids", "INVALID_FIELD", {"stop": pb.StopConditions(token_ids=[300])}),
        ("sampling.logit_bias", "INVALID_FIELD", {"sampling": pb.SamplingParams(logit_bias={300: 1})}),
        ("input", "INVALID_FIELD", {"prompt": None}),
    ],
)
async def test_what_the_model_cannot_take_is_refused(field: str, reason: str, fields: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(text=ScriptedText(context_length=10, vocab_size=300))) as served:
        told = await stream(served, **fields)
        assert_refused(told, Code.INVALID_ARGUMENT, reason)
        assert told.detail(error_details_pb2.BadRequest).field_violations[0].field == field
        if reason == "PROMPT_TOO_LONG":
            assert "20 tokens" in told.message
            assert "10 tokens" in told.message
        await served.idle()


async def test_unknown_models_and_engines_are_not_found() -> None:
    async with serving() as served:
        assert_refused(await stream(served, model="other"), Code.NOT_FOUND, "MODEL_NOT_FOUND")
        pinned = await stream(served, placement=pb.Placement(engine_id="other/0"))
        assert_refused(pinned, Code.NOT_FOUND, "ENGINE_NOT_FOUND")
        kind = await stream(served, placement=pb.Placement(engine_kind="ENGINE_KIND_REPLICA"))
        assert_refused(kind, Code.NOT_FOUND, "ENGINE_NOT_FOUND")


async def test_a_huge_bad_value_survives_as_a_status() -> None:
    async with serving() as served:
        for name in ("y" * 200_000, "é" * 100_000):
            told = await stream(served, model=name)
            assert_refused(told, Code.NOT_FOUND, "MODEL_NOT_FOUND")
            assert len(told.trailers["grpc-status-details-bin"]) < 4096
        assert (await stream(served)).text == "x"


async def test_a_full_queue_refuses_before_the_header_and_tells_when_to_come_back() -> None:
    gate = Gate()
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], gate=gate)), max_queue=1) as served:
        running = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await running.read()
        waiting = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await waiting.initial_metadata()
        for method in (served.generation.GenerateStream, served.generation.Generate):
            told = await outcome(method(pb.GenerateRequest(prompt="x")))
            assert_refused(told, Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            retry_ms = told.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
            assert retry_ms > 0
            assert told.trailers["grpc-retry-pushback-ms"] == str(retry_ms)
        gate.open()
        assert [(await outcome(call)).code for call in (running, waiting)] == [Code.OK, Code.OK]
        await served.idle()


async def test_every_call_of_a_burst_is_served_or_told_when_to_come_back() -> None:
    async with serving(max_queue=1) as served:
        calls = [served.generation.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(2500)]
        told = await asyncio.gather(*map(outcome, calls))
    assert {each.code for each in told} == {Code.OK, Code.RESOURCE_EXHAUSTED}


async def test_a_full_queue_refuses_before_tokenizing() -> None:
    text = GatedText()
    async with serving(ScriptedEngine(text=text), max_queue=1) as served:
        first = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await until(lambda: served.dispatcher.models[0].num_waiting == 1)
        assert_refused(await stream(served), Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        text.gate.set()
        assert (await outcome(first)).code is Code.OK
        assert text.num_prepared == 1


async def test_a_wait_that_is_over_ends_after_the_header() -> None:
    async with serving(ScriptedEngine(scripts=Script(gate=Gate()))) as served:
        running = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await running.read()
        told = await stream(served, max_queue_duration=Duration(nanos=50_000_000))
        assert (told.code, told.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        assert told.header["mini-infer-request-id"] == told.trailers["mini-infer-request-id"]
        assert told.detail(error_details_pb2.RetryInfo) is not None
        assert "grpc-retry-pushback-ms" not in told.trailers
        assert told.trailers["mini-infer-generated-tokens"] == "0"
        at_once = await stream(served, max_queue_duration=Duration())
        assert_refused(at_once, Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        assert "grpc-retry-pushback-ms" in at_once.trailers
        running.cancel()
        await served.idle()


async def test_a_draining_server_refuses_newcomers_and_ends_the_old() -> None:
    gate = Gate(1)
    async with serving(ScriptedEngine(scripts=Script(tokens=["a", "b"], gate=gate))) as served:
        old = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await old.read()
        draining = asyncio.ensure_future(served.dispatcher.drain(10))
        await asyncio.sleep(0)
        told = await stream(served)
        assert_refused(told, Code.UNAVAILABLE, "DRAINING")
        assert "grpc-retry-pushback-ms" in told.trailers
        gate.open()
        assert (await outcome(old)).code is Code.OK
        await draining


async def test_a_stream_that_outlives_the_grace_is_told() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate(1)))) as served:
        old = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await old.read()
        assert (await old.read()).delta.text == "a"
        await served.dispatcher.drain(0.05)
        told = await outcome(old)
        assert (told.code, told.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert told.trailers["mini-infer-generated-tokens"] == "1"


async def test_no_ready_engine_while_it_loads() -> None:
    gate = threading.Event()
    async with serving(ScriptedEngine(load_gate=gate), wait_ready=False) as served:
        told = await stream(served)
        assert_refused(told, Code.UNAVAILABLE, "NO_READY_ENGINE")
        assert "grpc-retry-pushback-ms" in told.trailers
        tokenize = await outcome(served.generation.Tokenize(pb.TokenizeRequest(text="x")))
        assert (tokenize.code, tokenize.reason) == (Code.UNAVAILABLE, "NO_READY_ENGINE")
        gate.set()
        await served.app.wait_ready()
        assert (await stream(served)).text == "x"


def failing(error: BaseException) -> Callable[[Any], Script]:
    """A script for each request: "bad" fails after two tokens, everything else goes on."""

    def script(prepared: Any) -> Script:
        tokens = ["a", "b", "c", "d"]
        return Script(tokens=tokens, fail_at=3, error=error) if len(prepared.prompt_ids) == 1 else Script(tokens=tokens)

    return script


async def test_an_engine_that_dies_ends_its_streams_with_what_they_had(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    engines = [
        ScriptedEngine(f"scripted/{n}", failing(RuntimeError("CUDA error: /secret")), max_running=2) for n in (0, 1)
    ]
    async with serving(*engines) as served:
        told = await stream(served)
        assert (told.code, told.reason) == (Code.UNAVAILABLE, "ENGINE_FAILED")
        assert told.text == "ab"
        assert told.detail(error_details_pb2.RetryInfo) is not None
        assert told.trailers["mini-infer-generated-tokens"] == "2"
        dead = told.trailers["mini-infer-engine-id"]
        assert dead == told.responses[0].started.engine.engine_id
        ttft_ms = float(told.trailers["mini-infer-ttft-ms"])
        assert ttft_ms == pytest.approx(
            told.responses[1].delta.first_token.time_to_first_token.ToNanoseconds() / 1e6, 0.01
        )
        assert "Traceback" not in told.message
        after = await stream(served, prompt="x y")
        assert after.text == "abcd"
        assert after.responses[0].started.engine.engine_id != dead
        pinned = await stream(served, placement=pb.Placement(engine_id=dead))
        assert_refused(pinned, Code.UNAVAILABLE, "NO_READY_ENGINE")
        await served.idle()
    assert [line["outcome"] for line in log_lines(caplog)] == ["ENGINE_FAILED", "eos", "NO_READY_ENGINE"]
    assert log_lines(caplog)[0]["tokens"] == "2"


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (StreamFailed("not numbers"), Code.INTERNAL, "STREAM_FAILED"),
        (OutOfMemory("too large"), Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"),
    ],
)
async def test_a_stream_that_goes_wrong_alone_leaves_its_neighbours(
    error: StreamFailed, code: Code, reason: str
) -> None:
    async with serving(ScriptedEngine(scripts=failing(error), max_running=4)) as served:
        neighbours = [asyncio.ensure_future(stream(served, prompt="x y")) for _ in range(3)]
        told = await stream(served)
        assert (told.code, told.reason, told.text) == (code, reason, "ab")
        assert told.trailers["mini-infer-generated-tokens"] == "2"
        assert [each.text for each in await asyncio.gather(*neighbours)] == ["abcd"] * 3
        await served.idle()


async def test_the_unary_call_fails_with_the_same_trailers() -> None:
    async with serving(ScriptedEngine(scripts=failing(StreamFailed("not numbers")))) as served:
        told = await outcome(served.generation.Generate(pb.GenerateRequest(prompt="x")))
        assert (told.code, told.reason) == (Code.INTERNAL, "STREAM_FAILED")
        assert told.trailers["mini-infer-generated-tokens"] == "2"
        assert told.trailers["mini-infer-engine-id"] == "scripted/0"
        await served.idle()


class BrokenText(ScriptedText):
    """A tokenizer with a fault of its own."""

    def tokenize(self, text: object) -> tuple[int, ...]:
        if text == "break":
            raise ZeroDivisionError("/secret")
        return super().tokenize(text)


async def test_what_nobody_foresaw_is_internal_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    async with serving(ScriptedEngine(text=BrokenText())) as served:
        told = await outcome(served.generation.Tokenize(pb.TokenizeRequest(text="break")))
        assert (told.code, told.reason) == (Code.INTERNAL, "INTERNAL")
        assert "secret" not in str(told)
        assert "ZeroDivisionError" in caplog.text, "the operator is told all of it"
        assert (await stream(served)).text == "x"


async def test_a_cancel_from_within_does_not_leave_a_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:

        def cancelled(_: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(served.dispatcher, "enter", cancelled)
        told = await stream(served)
        assert (told.code, told.reason) == (Code.INTERNAL, "INTERNAL")


class SurrogateEngine(ScriptedEngine):
    """Where the script says "!", half a character comes out."""

    def _post(self, *events: Any) -> None:
        broken = [replace(e, text="\ud83d") if isinstance(e, Delta) and e.text == "!" else e for e in events]
        super()._post(*broken)


async def test_text_that_cannot_be_sent_fails_its_stream_alone() -> None:
    async with serving(SurrogateEngine(max_running=2)) as served:
        broken, whole = await asyncio.gather(stream(served, prompt="!"), stream(served, prompt="fine"))
        assert (broken.code, broken.reason) == (Code.INTERNAL, "STREAM_FAILED")
        assert whole.text == "fine"
        await served.idle()


async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    async with serving() as served:
        for method, kind in (("Generate", "unary_unary"), ("GenerateStream", "unary_stream")):
            call = getattr(served.channel, kind)(f"/mini_infer.v1.GenerationService/{method}")
            told = await outcome(call(b"\xff\xff\xff"))
            assert told.code is Code.INVALID_ARGUMENT
        unknown = served.channel.unary_unary("/mini_infer.v1.GenerationService/Nothing")
        assert (await outcome(unknown(b""))).code is Code.UNIMPLEMENTED
