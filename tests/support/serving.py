"""Servers for tests: in this process over scripted engines, always on a port of their own."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from support.dispatching import idle

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

    @property
    def health(self) -> health_pb2_grpc.HealthStub:
        return health_pb2_grpc.HealthStub(self.channel)

    async def idle(self) -> None:
        """Waits until nothing runs and nothing waits."""
        await idle(self.dispatcher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that a client saw of one call."""

    code: grpc.StatusCode
    message: str
    header: dict[str, Any]
    trailers: dict[str, Any]
    responses: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(each.delta.text for each in self.responses)

    @property
    def reason(self) -> str:
        """The word for programs; empty where the status is not of our making."""
        info = self.detail(error_details_pb2.ErrorInfo)
        return info.reason if info else ""

    def detail(self, kind: type) -> Any:
        """The status's detail of one type, or None."""
        status = status_pb2.Status.FromString(self.trailers.get("grpc-status-details-bin", b""))
        for packed in status.details:
            message = kind()
            if packed.Unpack(message):
                return message
        return None


async def outcome(call: Any) -> Outcome:
    """Reads a call of either kind to its end, good or bad; what `call.read()` took before is not in it."""
    responses = []
    async with asyncio.timeout(20):
        try:
            if hasattr(call, "read"):
                while (response := await call.read()) is not grpc.aio.EOF:
                    responses.append(response)
            else:
                responses.append(await call)
        except grpc.aio.AioRpcError:
            pass
        return Outcome(
            code=await call.code(),
            message=await call.details() or "",
            header=dict(await call.initial_metadata() or ()),
            trailers=dict(await call.trailing_metadata() or ()),
            responses=responses,
        )


def log_lines(caplog: Any) -> list[dict[str, str]]:
    """The generations' lines in the log, as facts by name."""
    lines = [record.getMessage() for record in caplog.records if record.name == "mini_infer.server.generation"]
    return [dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)) for line in lines]


def log_everything(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="mini_infer.server.generation")


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
