"""AdminService over a dispatcher: lists engines. Watching, draining and resuming them is not in this version."""

# ruff: noqa: ARG002, N802  # gRPC gives the methods their names and arguments

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import NoReturn

import grpc

from mini_infer.server import convert_response
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.interceptors import Context
from mini_infer.v1 import admin_pb2 as pb
from mini_infer.v1 import admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The service that operators use."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Context) -> pb.ListEnginesResponse:
        """Every engine as it is now."""
        now_ns = time.monotonic_ns()
        return pb.ListEnginesResponse(
            engines=[convert_response.engine_status(each, now_ns) for each in self._dispatcher.engines]
        )

    async def WatchEngines(
        self, request: pb.WatchEnginesRequest, context: Context
    ) -> AsyncGenerator[pb.WatchEnginesResponse, None]:
        """Not in this version."""
        await _not_here(context, "WatchEngines")
        yield pb.WatchEnginesResponse()  # never reached: it makes this a generator, as gRPC wants a stream to be

    async def DrainEngine(self, request: pb.DrainEngineRequest, context: Context) -> NoReturn:
        """Not in this version."""
        await _not_here(context, "DrainEngine")

    async def ResumeEngine(self, request: pb.ResumeEngineRequest, context: Context) -> NoReturn:
        """Not in this version."""
        await _not_here(context, "ResumeEngine")


async def _not_here(context: Context, method: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not in this version")
