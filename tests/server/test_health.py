"""grpc.health.v1 over a real channel: ready only after a real token, and never after a drain has begun."""

import asyncio
import logging
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from support.dispatching import ManualEngine
from support.serving import Served, outcome, serving, serving_pools

from mini_infer.engines.api import EngineState
from mini_infer.engines.errors import EngineFailed
from mini_infer.engines.scripted_engine import Script, ScriptedEngine
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.v1 import generation_pb2

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
READY = ("", "mini_infer.v1.GenerationService")
LIVE = "mini_infer.live"


async def check(served: Served, name: str = "") -> int:
    return (await served.health.Check(pb.HealthCheckRequest(service=name))).status


async def next_status(watch: object) -> int:
    return (await asyncio.wait_for(watch.read(), 10)).status


async def test_alive_at_once_and_ready_when_loaded() -> None:
    gate = threading.Event()
    async with serving(ScriptedEngine(load_gate=gate), wait_ready=False) as served:
        watch = served.health.Watch(pb.HealthCheckRequest())
        assert await next_status(watch) == NOT_SERVING
        for name in (*READY, "mini_infer.engine.scripted/0"):
            assert await check(served, name) == NOT_SERVING
        assert await check(served, LIVE) == SERVING
        gate.set()
        await served.app.wait_ready()
        assert await next_status(watch) == SERVING
        for name in (*READY, LIVE, "mini_infer.engine.scripted/0"):
            assert await check(served, name) == SERVING


async def test_not_before_a_real_token() -> None:
    engine = ManualEngine(loads=False)
    async with serving(engine, wait_ready=False) as served:
        engine.become(EngineState.WARMING_UP)
        assert await check(served) == NOT_SERVING
        engine.become(EngineState.READY)
        await served.app.wait_ready()
        assert await check(served) == SERVING


async def test_unknown_names() -> None:
    async with serving() as served:
        for name in ("other", "mini_infer.engine.other", "scripted/0", "mini_infer.engine."):
            told = await outcome(served.health.Check(pb.HealthCheckRequest(service=name)))
            assert told.code is grpc.StatusCode.NOT_FOUND
        watch = served.health.Watch(pb.HealthCheckRequest(service="other"))
        assert await next_status(watch) == pb.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_dead_engine_turns_its_own_name_off_and_the_last_one_turns_all_off() -> None:
    first, second = ManualEngine("m/0"), ManualEngine("m/1")
    async with serving(first, second) as served:
        watch = served.health.Watch(pb.HealthCheckRequest(service=READY[1]))
        own = served.health.Watch(pb.HealthCheckRequest(service="mini_infer.engine.m/0"))
        assert [await next_status(watch), await next_status(own)] == [SERVING, SERVING]
        first.become(EngineState.FAILED, EngineFailed("CUDA error"))
        assert await next_status(own) == NOT_SERVING
        assert await check(served) == SERVING
        second.become(EngineState.FAILED, EngineFailed("CUDA error"))
        assert await next_status(watch) == NOT_SERVING
        assert await check(served) == NOT_SERVING
        assert await check(served, LIVE) == SERVING
        watch.cancel()
        own.cancel()


async def test_an_engine_that_dies_in_a_step_turns_health_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], fail_at=1, error=RuntimeError("dead")))) as served:
        watch = served.health.Watch(pb.HealthCheckRequest())
        assert await next_status(watch) == SERVING
        await outcome(served.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="x")))
        assert await next_status(watch) == NOT_SERVING
        watch.cancel()


async def test_every_model_must_have_an_engine() -> None:
    engines = [ManualEngine(f"{name}/0") for name in ("one", "two")]
    pools = [Pool(config=PoolConfig(model=engine.engine_id[:3]), engines=[engine]) for engine in engines]
    async with serving_pools(pools) as served:
        assert await check(served) == SERVING
        watch = served.health.Watch(pb.HealthCheckRequest())
        await next_status(watch)
        engines[1].become(EngineState.FAILED, EngineFailed("CUDA error"))
        assert await next_status(watch) == NOT_SERVING
        watch.cancel()


async def test_a_drain_turns_every_name_off_and_ends_the_watches() -> None:
    names = (*READY, LIVE, "mini_infer.engine.scripted/0")
    async with serving(grace_s=30) as served:
        watches = [served.health.Watch(pb.HealthCheckRequest(service=name)) for name in names]
        assert [await next_status(watch) for watch in watches] == [SERVING] * 4
        async with asyncio.timeout(10):  # far below the grace: open watches hold up nothing
            await served.app.stop()
        for watch in watches:
            assert await next_status(watch) == NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() is grpc.StatusCode.OK


async def test_watchers_come_and_go() -> None:
    async with serving() as served:
        for _ in range(20):
            watch = served.health.Watch(pb.HealthCheckRequest())
            assert await next_status(watch) == SERVING
            watch.cancel()
        assert await check(served) == SERVING
