"""A server as a whole: its services on one port, and the order in which it starts and stops. Reads no configuration."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mini_infer.server.address import CannotListen, bound_address, listen_address
from mini_infer.server.admin import AdminServicer
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.health import HealthServicer
from mini_infer.server.interceptors import ErrorInterceptor
from mini_infer.server.pool import ModelSnapshot
from mini_infer.server.server_info import MAX_MESSAGE_BYTES, ServerInfo
from mini_infer.server.servicer import GenerationServicer
from mini_infer.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

LAST_WORDS_S = 1.0
"""How long a drained server lets clients read their last messages."""

MAX_UNREAD_CALLS = 10_000
"""Calls that wait to be looked at, each with at most the first 64 KiB of its request."""

OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # By default gRPC cuts calls of a burst off as CANCELLED; they are to hear QUEUE_FULL, and when to come back.
    ("grpc.server.max_pending_requests", MAX_UNREAD_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_UNREAD_CALLS),
    # A client may ping every 10 s, with and without calls: a long prefill sends nothing meanwhile.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Finds peers that are gone without a word, whose streams would hold their slots.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a long prefill again
)


class App:
    """The services over one dispatcher. ``host`` and ``port`` as `listen_address` takes them; port 0 is any."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grace_s: float = 0.0,
        propagation_s: float = 0.0,
    ) -> None:
        self._dispatcher = dispatcher
        self._host, self._port = host, port
        self._grace_s, self._propagation_s = grace_s, propagation_s
        self._health = HealthServicer(dispatcher)
        self._server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=OPTIONS)
        self._add_services()

    async def start(self) -> str:
        """Listens, serves health, and begins to load the engines. Returns the address. Raises `CannotListen`."""
        address = self._bind()
        await self._server.start()
        await self._dispatcher.start()
        return address

    @property
    def models(self) -> list[ModelSnapshot]:
        """All models as they are now."""
        return self._dispatcher.models

    async def wait_ready(self) -> None:
        """Waits for every engine. Raises `LoadError` where one does not come up."""
        await self._dispatcher.wait_ready()

    async def stop(self) -> None:
        """Drains and stops.

        Health goes first and newcomers are still served for ``propagation_s``, so that those who watch health go
        elsewhere in time; then what runs has ``grace_s`` to end; engines go last, when no call needs them.
        """
        self._health.drain()
        await asyncio.sleep(self._propagation_s)
        await self._dispatcher.drain(self._grace_s)
        await self._close(LAST_WORDS_S)

    async def stop_at_once(self) -> None:
        """Ends every call now."""
        await self._close(None)

    async def _close(self, last_words_s: float | None) -> None:
        self._health.end_watches()
        await self._server.stop(last_words_s)
        await self._dispatcher.close()

    def _bind(self) -> str:
        address = listen_address(self._host, self._port)
        try:
            return bound_address(address, self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}") from error

    def _add_services(self) -> None:
        servicer = GenerationServicer(self._dispatcher, ServerInfo())
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self._dispatcher), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        files = (generation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
        names = [name for file in files for name in (each.full_name for each in file.services_by_name.values())]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], self._server)
