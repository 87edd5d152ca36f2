"""Servers for tests: in this process over scripted engines, always on a port of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from mini_infer.engines.api import Engine
from mini_infer.engines.scripted_engine import ScriptedEngine
from mini_infer.server.app import App
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.v1 import admin_pb2_grpc, generation_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server, one channel to it, and what is behind it."""

    address: str
    channel: grpc.aio.Channel
    app: App
    dispatcher: Dispatcher
    engines: Sequence[Engine]

    @property
    def generation(self) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        return admin_pb2_grpc.AdminServiceStub(self.channel)


@asynccontextmanager
async def serving(
    *engines: Engine,
    model: str = "scripted",
    max_queue: int = 256,
    stall_timeout_s: float = 600.0,
    grace_s: float = 0.0,
    host: str = "127.0.0.1",
    wait_ready: bool = True,
) -> AsyncIterator[Served]:
    """One model over scripted engines: by default a single one that echoes the prompt."""
    engines = engines or (ScriptedEngine(),)
    pool = Pool(config=PoolConfig(model=model, max_queue=max_queue), engines=engines)
    async with serving_pools(
        [pool], stall_timeout_s=stall_timeout_s, grace_s=grace_s, host=host, wait_ready=wait_ready
    ) as served:
        yield served


@asynccontextmanager
async def serving_pools(
    pools: Sequence[Pool],
    *,
    stall_timeout_s: float = 600.0,
    grace_s: float = 0.0,
    host: str = "127.0.0.1",
    wait_ready: bool = True,
) -> AsyncIterator[Served]:
    """Any number of models."""
    dispatcher = Dispatcher(pools, stall_timeout_s=stall_timeout_s)
    app = App(dispatcher, host=host, port=0, grace_s=grace_s)
    address = await app.start()
    try:
        if wait_ready:
            await app.wait_ready()
        async with grpc.aio.insecure_channel(address) as channel:
            engines = [engine for pool in pools for engine in pool.engines]
            yield Served(address=address, channel=channel, app=app, dispatcher=dispatcher, engines=engines)
    finally:
        await app.stop_at_once()
