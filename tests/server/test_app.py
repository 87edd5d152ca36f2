"""The server as a whole over a real channel: limits, many streams, addresses, pings, memory, the order of its end."""

import asyncio
import gc
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.serving import Served, outcome, serving

from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.server.address import CannotListen
from mini_infer.server.app import App
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.server.server_info import MAX_MESSAGE_BYTES
from mini_infer.v1 import generation_pb2 as pb
from mini_infer.v1 import generation_pb2_grpc

Code = grpc.StatusCode
KIB = 1024


async def canary(served: Served) -> bool:
    return (await served.generation.Generate(pb.GenerateRequest(prompt="a canary"), timeout=20)).text == "a canary"


# --- limits -------------------------------------------------------------------------------------------------------


async def test_messages_up_to_the_limit_are_read_and_above_it_refused() -> None:
    overhead = pb.GenerateRequest(prompt="x" * MAX_MESSAGE_BYTES).ByteSize() - MAX_MESSAGE_BYTES
    async with serving() as served:
        for num_bytes, reason in (
            (MAX_MESSAGE_BYTES - KIB, "INVALID_FIELD"),  # read, and then too long for a prompt
            (MAX_MESSAGE_BYTES, "INVALID_FIELD"),
            (MAX_MESSAGE_BYTES + KIB, ""),  # gRPC itself refuses
            (60 << 20, ""),
        ):
            request = pb.GenerateRequest(prompt="x" * (num_bytes - overhead))
            assert request.ByteSize() == num_bytes
            told = await outcome(served.generation.GenerateStream(request))
            assert told.reason == reason
            assert told.code is (Code.INVALID_ARGUMENT if reason else Code.RESOURCE_EXHAUSTED)
            assert await canary(served)


async def test_the_largest_prompt_goes_through() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=["ok"]))) as served:
        assert (await served.generation.Generate(pb.GenerateRequest(prompt="x" * 2**20))).text == "ok"


async def test_a_large_answer_fits_one_message_or_says_that_it_does_not() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=["x" * 10**6], repeat=True))) as served:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        async with grpc.aio.insecure_channel(served.address, options=options) as channel:
            generate = generation_pb2_grpc.GenerationServiceStub(channel).Generate
            fits = await generate(pb.GenerateRequest(prompt="x", stop=pb.StopConditions(max_new_tokens=15)))
            assert len(fits.text) == 15 * 10**6
            told = await outcome(generate(pb.GenerateRequest(prompt="x", stop=pb.StopConditions(max_new_tokens=17))))
            assert (told.code, told.reason) == (Code.INTERNAL, "STREAM_FAILED")
            assert "GenerateStream" in told.message
        await served.idle()


# --- many ---------------------------------------------------------------------------------------------------------


async def test_a_hundred_and_fifty_streams_share_one_channel() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a", "b", "c"]), max_running=4)
    async with serving(engine, max_queue=60) as served:
        calls = [served.generation.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(150)]
        told = await asyncio.gather(*map(outcome, calls))
        done = [each for each in told if each.code is Code.OK]
        refused = [each for each in told if each.code is not Code.OK]
        assert len(done) >= 60
        assert all(each.text == "abc" for each in done)
        assert all(each.reason == "QUEUE_FULL" for each in refused)
        assert engine.peak_running <= 4
        await served.idle()


async def test_the_limit_holds_in_every_wave() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"] * 3), max_running=4)
    async with serving(engine, max_queue=4) as served:
        for _ in range(3):
            calls = [served.generation.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(12)]
            told = await asyncio.gather(*map(outcome, calls))
            assert {each.reason for each in told} <= {"", "QUEUE_FULL"}
            assert sum(each.code is Code.OK for each in told) >= 4
            await served.idle()
        assert engine.peak_running <= 4


async def test_health_and_reflection_answer_when_all_is_full() -> None:
    gate = Gate()
    async with serving(ScriptedEngine(scripts=Script(gate=gate)), max_queue=1) as served:
        running = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await running.read()
        waiting = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        await waiting.initial_metadata()
        assert (await outcome(served.generation.Generate(pb.GenerateRequest(prompt="x")))).reason == "QUEUE_FULL"
        assert (await served.health.Check(health_pb2.HealthCheckRequest())).status == 1
        assert set(await services(served.channel)) == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "mini_infer.v1.AdminService",
            "mini_infer.v1.GenerationService",
        }
        gate.open()
        await asyncio.gather(outcome(running), outcome(waiting))


async def services(channel: grpc.aio.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    return [service.name for service in (await call.read()).list_services_response.service]


# --- while nothing comes ------------------------------------------------------------------------------------------


async def test_the_header_comes_while_the_prompt_is_worked_on() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], prefill_s=3600))) as served:
        call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
        async with asyncio.timeout(20):
            assert dict(await call.initial_metadata())["mini-infer-request-id"]
            assert (await call.read()).HasField("started")
        call.cancel()


@pytest.mark.full
async def test_pings_of_a_waiting_client_are_not_punished() -> None:
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with (
        serving(ScriptedEngine(scripts=Script(tokens=["a"], prefill_s=45))) as served,
        grpc.aio.insecure_channel(served.address, options=options) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for idle_s in (0, 25):
            await asyncio.sleep(idle_s)
            told = await outcome_within(stub.GenerateStream(pb.GenerateRequest(prompt="x")), 60)
            assert told.code is Code.OK


async def outcome_within(call: Any, timeout_s: float) -> Any:
    first = await asyncio.wait_for(call.read(), timeout_s)
    assert first.HasField("started")
    async with asyncio.timeout(timeout_s):
        await call.read()
    return await outcome(call)


# --- where --------------------------------------------------------------------------------------------------------


def app_at(host: str, port: int) -> App:
    pool = Pool(config=PoolConfig(model="m"), engines=[ScriptedEngine()])
    return App(Dispatcher([pool]), host=host, port=port)


async def test_a_second_server_on_the_port_fails() -> None:
    async with serving() as served:
        port = int(served.address.rpartition(":")[2])
        second = app_at("127.0.0.1", port)
        with pytest.raises(CannotListen, match="in use"):
            await second.start()
        await second.stop_at_once()
        assert await canary(served)


async def test_a_port_that_is_lost_at_the_last_moment_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.server.address._require_free_port", lambda host, port: None)
    async with serving() as served:
        second = app_at("127.0.0.1", int(served.address.rpartition(":")[2]))
        with pytest.raises(CannotListen, match=r"cannot listen on 127\.0\.0\.1:"):
            await second.start()
        await second.stop_at_once()


@pytest.mark.parametrize("options", [[], [("grpc.default_authority", "localhost")]], ids=["plain", "authority"])
async def test_a_unix_socket_serves(tmp_path: Path, options: list[tuple[str, str]]) -> None:
    async with serving(host=f"unix:{tmp_path}/s") as served:
        assert served.address == f"unix:{tmp_path}/s"
        async with grpc.aio.insecure_channel(served.address, options=options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            assert (await stub.Generate(pb.GenerateRequest(prompt="x"))).text == "x"
        second = app_at(served.address, 0)
        with pytest.raises(CannotListen, match="in use"):
            await second.start()
        await second.stop_at_once()
        assert await canary(served)


async def test_loopback_is_one_caller_over_either_ip_version() -> None:
    async with serving(ScriptedEngine(scripts=Script(gate=Gate())), host="localhost") as served:
        port = served.address.rpartition(":")[2]
        call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x", request_id="mine"))
        await call.read()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            told = await stub.CancelGeneration(pb.CancelGenerationRequest(request_ids=["mine"]))
        assert len(told.cancelled_request_ids) == 1
        assert (await outcome(call)).code is Code.OK


# --- the end ------------------------------------------------------------------------------------------------------


async def test_newcomers_are_served_until_health_had_time_to_spread() -> None:
    pool = Pool(config=PoolConfig(model="m"), engines=[ScriptedEngine()])
    app = App(Dispatcher([pool]), propagation_s=0.5, grace_s=5)
    address = await app.start()
    await app.wait_ready()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await stub.Generate(pb.GenerateRequest(prompt="x"))
        stopping = asyncio.ensure_future(app.stop())
        await asyncio.sleep(0)
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health_pb2.HealthCheckResponse.FromString(await check(b"")).status == 2
        assert (await stub.Generate(pb.GenerateRequest(prompt="late"))).text == "late"
        await stopping


async def test_streams_finish_within_the_grace_and_the_rest_is_told() -> None:
    def script(prepared: Any) -> Script:
        num_tokens = 10 if len(prepared.prompt_ids) == 1 else 10_000
        return Script(tokens=["a"] * num_tokens, step_s=0.02)

    async with serving(ScriptedEngine(scripts=script, max_running=2), grace_s=1.5) as served:
        short = served.generation.GenerateStream(pb.GenerateRequest(prompt="short"))
        long = served.generation.GenerateStream(pb.GenerateRequest(prompt="a long one", stop={"max_new_tokens": 4000}))
        await short.read()
        await long.read()
        began_s = time.monotonic()
        stopping = asyncio.ensure_future(served.app.stop())
        told = await asyncio.gather(outcome(short), outcome(long))
        await stopping
        assert time.monotonic() - began_s < 1.5 + 10  # alone, the long one takes 80 s
    assert told[0].code is Code.OK
    assert (told[1].code, told[1].reason) == (Code.UNAVAILABLE, "DRAINING")
    assert told[1].trailers["mini-infer-ttft-ms"]


async def test_stopping_twice_and_before_the_start_is_harmless() -> None:
    app = app_at("127.0.0.1", 0)
    await app.stop_at_once()
    await app.stop_at_once()


# --- for long -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_cancelled_streams_leave_no_memory_behind() -> None:
    engine = ScriptedEngine(scripts=Script(tokens=["a"], repeat=True, step_s=0.001), max_running=64)
    rounds: list[int] = []
    async with serving(engine, max_queue=2000) as served:

        async def come_and_go() -> None:
            call = served.generation.GenerateStream(pb.GenerateRequest(prompt="x"))
            await call.read()
            call.cancel()

        for _ in range(6):
            for _ in range(20):
                await asyncio.gather(*(come_and_go() for _ in range(50)))
            await served.idle()
            gc.collect()
            rounds.append(psutil.Process().memory_info().rss)
    growth_bytes = (rounds[-1] - rounds[2]) / 3000
    assert growth_bytes < KIB, f"{growth_bytes:.0f} bytes a stream with grpcio {grpc.__version__}: {rounds}"


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_processes_that_are_started_meanwhile_stall_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A fork in a process full of threads; nothing may hang, nothing may be said on stderr."""
    engine = ScriptedEngine(scripts=Script(tokens=["a"], repeat=True, step_s=0.01), max_running=4)
    async with serving(engine) as served:
        calls = [served.generation.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(4)]
        gaps_s: list[float] = []

        async def read(call: Any) -> None:
            last_s = time.monotonic()
            while await call.read() is not grpc.aio.EOF:
                now_s = time.monotonic()
                gaps_s.append(now_s - last_s)
                last_s = now_s

        readers = [asyncio.ensure_future(read(call)) for call in calls]

        def fork_often() -> None:
            for _ in range(100):
                subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)

        await asyncio.to_thread(fork_often)
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await served.idle()
    assert max(gaps_s) < 1
    # gRPC itself may note, once, that the stopping server said goodbye to a client that was still there.
    assert not [line for line in capfd.readouterr().err.splitlines() if "Got goaway" not in line]
