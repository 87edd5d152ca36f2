"""grpc.health.v1 as the dispatcher's engines are at this moment. Keeps no status of its own, so none goes stale.

Names: "" and the generation service are ready, `LIVE` is alive, and one name for each engine.
"""

# ruff: noqa: ARG002, N802  # gRPC gives the methods their names and arguments

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from mini_infer.engines.api import EngineState
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.interceptors import Context
from mini_infer.server.pool import EngineSnapshot

LIVE = "mini_infer.live"
READY = ("", "mini_infer.v1.GenerationService")
ENGINE_PREFIX = "mini_infer.engine."

_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # shipped without types
    """Ready means: every model has an engine that has made a token and takes streams, and no drain has begun."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._draining = False
        self._ended = False
        self._changed = asyncio.Event()  # a new one after every change, so that every watcher hears of each
        dispatcher.on_change(self._notify)

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """The status now; NOT_FOUND for a name that there is not."""
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """The status now and after every change, until the server stops."""
        told = None
        while True:
            changed, ended = self._changed, self._ended
            status = self._status(request.service)
            if status != told:
                yield pb.HealthCheckResponse(status=status)
                told = status
            if ended:
                return
            await changed.wait()

    def drain(self) -> None:
        """Turns every name to NOT_SERVING, for good."""
        self._draining = True
        self._notify()

    def end_watches(self) -> None:
        """Ends the open Watch calls: the server's stop would wait for them."""
        self._ended = True
        self._notify()

    def _notify(self, _: EngineSnapshot | None = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> int:
        is_serving = self._is_serving(service)
        if is_serving is None:
            return int(_UNKNOWN)
        serving, not_serving = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
        return int(serving if is_serving and not self._draining else not_serving)

    def _is_serving(self, service: str) -> bool | None:
        ready = {each.engine_id: each.state is EngineState.READY for each in self._dispatcher.engines}
        if service == LIVE:
            return True
        if service in READY:
            return all(any(ready[engine_id] for engine_id in model.engine_ids) for model in self._dispatcher.models)
        return ready.get(service.removeprefix(ENGINE_PREFIX)) if service.startswith(ENGINE_PREFIX) else None
