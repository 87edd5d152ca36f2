"""The asynchronous client: a channel and one method for each method of the server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import metadata
from types import TracebackType
from typing import Self, TypeVar, Unpack

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mini_infer.client import convert, readiness, results
from mini_infer.client.calls import our_errors
from mini_infer.client.errors import (
    ClientClosed,
    MiniInferError,
    NotFound,
    ProtocolViolation,
    ServerUnreachable,
    Truncated,
)
from mini_infer.client.requests import GenerateOptions, Message, fill, generate_request, may_queue
from mini_infer.client.retries import Retries
from mini_infer.client.stream import Call, GenerationStream, OnRetry
from mini_infer.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc
from mini_infer.v1 import generation_pb2 as pb

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The server's limit too."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Client:
    """A connection to a server, open inside ``async with Client("localhost:50051") as client``.

    ``max_attempts`` bounds how often a call is tried where no token came: the server is busy and says when to come
    back, its engine failed, the connection broke (see `retries`). 1 turns that off. A generation that may not wait in
    the queue (``max_queue_duration_s=0``) is not tried again for being refused there. Each ``timeout_s`` spans all
    attempts of a call. Every method raises `MiniInferError`.
    """

    def __init__(self, address: str, *, max_attempts: int = 3) -> None:
        self.address = address
        self._max_attempts = max_attempts
        self._open: _Open | None = None

    async def __aenter__(self) -> Self:
        try:
            self.address.encode()
        except UnicodeEncodeError:
            raise ServerUnreachable(f"{self.address!r} is no address") from None
        self._open = _Open(aio.insecure_channel(self.address, options=channel_options(self.address)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what still runs, with `ClientClosed`, and the connection. Idempotent."""
        if self._open is not None:
            closing, self._open = self._open, None
            await closing.channel.close()

    def stream(
        self, *, timeout_s: float | None = None, on_retry: OnRetry | None = None, **options: Unpack[GenerateOptions]
    ) -> GenerationStream:
        """Generates an answer and streams it as it is made. Nothing is sent until the stream is read or entered.

        ``on_retry`` is called before each wait for another attempt, with the failure of the last one and the seconds.
        Raises `InvalidArgument` at once for values that no field can hold; the rest is checked by the server.
        """
        request = generate_request(options)

        def open_call(attempt_timeout_s: float | None) -> Call:
            return self._stubs.generation.GenerateStream(request, timeout=attempt_timeout_s)

        def new_retries() -> Retries:  # the clock runs from when the call begins
            return Retries(self._max_attempts, timeout_s, may_queue=may_queue(request))

        return GenerationStream(open_call, new_retries, on_retry or (lambda _error, _wait_s: None))

    async def generate(self, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]) -> results.Result:
        """Generates one whole answer."""
        request = generate_request(options)
        retries = Retries(self._max_attempts, timeout_s, may_queue=may_queue(request))
        response = await self._repeat(self._stubs.generation.Generate, request, retries)
        if not response.HasField("finished"):
            raise Truncated("the answer came without its end")
        return convert.unary_result(response)

    async def cancel(self, request_ids: Sequence[str], *, timeout_s: float | None = 30.0) -> results.Cancelled:
        """Ends generations by the server's ids or the callers' labels; each ends well, as "cancelled"."""
        request = fill(pb.CancelGenerationRequest(), {"request_ids": request_ids})
        response = await self._call(self._stubs.generation.CancelGeneration, request, timeout_s)
        return results.Cancelled(
            cancelled=tuple(response.cancelled_request_ids), not_found=tuple(response.not_found_request_ids)
        )

    async def tokenize(
        self, text_or_messages: str | Sequence[Message], *, model: str = "", timeout_s: float | None = 30.0
    ) -> results.Tokens:
        """The token ids that a generation would be fed with."""
        path = "text" if isinstance(text_or_messages, str) else "chat.messages"
        request = fill(pb.TokenizeRequest(), {"model": model, path: text_or_messages})
        response = await self._call(self._stubs.generation.Tokenize, request, timeout_s)
        return results.Tokens(token_ids=tuple(response.token_ids), context_length=response.context_length)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = 30.0,
    ) -> str:
        """The text of token ids."""
        values = {"model": model, "token_ids": token_ids, "skip_special_tokens": skip_special_tokens}
        request = fill(pb.DetokenizeRequest(), values)
        return (await self._call(self._stubs.generation.Detokenize, request, timeout_s)).text

    async def models(self, *, timeout_s: float | None = 30.0) -> tuple[results.Model, ...]:
        """The served models."""
        response = await self._call(self._stubs.generation.ListModels, pb.ListModelsRequest(), timeout_s)
        return tuple(convert.model(model) for model in response.models)

    async def server_info(self, *, timeout_s: float | None = 30.0) -> results.ServerInfo:
        """Versions, limits and start time of the server."""
        request = pb.GetServerInfoRequest()
        return convert.server_info(await self._call(self._stubs.generation.GetServerInfo, request, timeout_s))

    async def engines(self, *, timeout_s: float | None = 30.0) -> tuple[results.Engine, ...]:
        """The engines as they are now."""
        response = await self._call(self._stubs.admin.ListEngines, admin_pb2.ListEnginesRequest(), timeout_s)
        return tuple(convert.engine(engine) for engine in response.engines)

    async def health(self, service: str = "", *, timeout_s: float | None = 30.0) -> str:
        """SERVING, NOT_SERVING, UNKNOWN or SERVICE_UNKNOWN, as grpc.health.v1 has it; asked once, never repeated."""
        request = fill(health_pb2.HealthCheckRequest(), {"service": service})
        try:
            response = await self._call(self._stubs.health.Check, request, timeout_s, max_attempts=1)
        except NotFound:
            return "SERVICE_UNKNOWN"
        return _serving_status(response)

    async def watch_health(self, service: str = "", *, timeout_s: float | None = None) -> AsyncIterator[str]:
        """The health of a service now and at every change, until the server ends the watch."""
        request = fill(health_pb2.HealthCheckRequest(), {"service": service})
        call = self._stubs.health.Watch(request, timeout=Retries(1, timeout_s).remaining_s())
        try:
            while True:
                with our_errors(call):
                    response = await call.read()
                if response is aio.EOF:
                    return
                yield _serving_status(response)
        finally:
            call.cancel()

    async def wait_ready(
        self, timeout_s: float, on_progress: Callable[[Sequence[results.Engine]], None] | None = None
    ) -> None:
        """Waits until the server is there and takes generations. Calls ``on_progress`` with the engines as they are,
        none while there is no server. Raises `DeadlineExceeded`, or `NoReadyEngine` once every engine has failed.
        """
        await readiness.wait_ready(self, timeout_s, on_progress or (lambda _engines: None))

    @property
    def _stubs(self) -> _Open:
        if self._open is None:
            raise ClientClosed("the client is not open: use it inside `async with Client(...) as client`")
        return self._open

    async def _call(
        self,
        method: Callable[..., aio.UnaryUnaryCall[_Request, _Response]],
        request: _Request,
        timeout_s: float | None,
        *,
        max_attempts: int | None = None,
    ) -> _Response:
        return await self._repeat(method, request, Retries(max_attempts or self._max_attempts, timeout_s))

    async def _repeat(
        self, method: Callable[..., aio.UnaryUnaryCall[_Request, _Response]], request: _Request, retries: Retries
    ) -> _Response:
        while True:
            call = method(request, timeout=retries.remaining_s())
            try:
                with our_errors(call):
                    response = await call
            except MiniInferError as error:
                await asyncio.sleep(retries.wait_s(error))
                continue
            if response is None:  # grpc.aio logs what it cannot parse and hands over None
                raise ProtocolViolation("the server sent a message of another kind")
            return response


class _Open:
    """A channel and the stubs on it."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel = channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


def channel_options(address: str) -> list[tuple[str, str | int]]:
    """How our channels differ from gRPC's defaults."""
    host = address.rpartition(":")[0].strip("[]")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    return [
        ("grpc.primary_user_agent", f"mini-infer/{version()}"),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A long prefill sends nothing: notice a dead peer within 80 s, and never stop asking.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A server that is only just starting is found quickly.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),  # see retries.py
        # gRPC asks the proxy of http_proxy even for this machine, which a probe inside a container does not survive.
        ("grpc.enable_http_proxy", int(not is_loopback)),
    ]


@functools.cache
def version() -> str:
    """This package's version; "unknown" where it runs from a source tree."""
    try:
        return metadata.version("mini-infer")
    except metadata.PackageNotFoundError:
        return "unknown"


def _serving_status(response: health_pb2.HealthCheckResponse) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
