"""The edge between handlers and gRPC: whatever a handler raises leaves as a status, and no other way.

Four traps of grpc.aio are closed here. An `AbortError` is an `Exception` and must pass. So is the `InternalError` of
something that could not be sent, since the client is gone: a status could not be either. A `CancelledError` that is
not the call's own would send nothing at all, and its client would wait for ever. And a generator of responses would
be closed only when it is collected, where the client leaves while a message is being written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mini_infer.engines.errors import MiniInferError
from mini_infer.server.errors import Status, status_of

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@asynccontextmanager
async def error_edge(context: Context, to_status: Callable[[Exception], Status] = status_of) -> AsyncIterator[None]:
    """Turns an exception of its body into the call's status. Only the call's own cancellation passes."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.InternalError):
        raise
    except asyncio.CancelledError as error:
        if _call_is_cancelled():
            raise
        _log.error("something that a call waited for was cancelled", exc_info=error)
        await _abort(context, to_status(RuntimeError("cancelled from within")))
    except Exception as error:  # noqa: BLE001  # the edge
        if not isinstance(error, MiniInferError):
            _log.error("a call failed", exc_info=error)
        await _abort(context, to_status(error))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Puts every handler behind the edge."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps the handler that gRPC found; without one gRPC itself answers UNIMPLEMENTED."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:  # reflection is the only one, and not ours
            return handler  # type: ignore[no-any-return]
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _stream_behaviour(handler.unary_stream), _decoder(handler), handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            _unary_behaviour(handler.unary_unary), _decoder(handler), handler.response_serializer
        )


class _Undecodable(Exception):
    """Bytes that are no message of the method's type."""


def _decoder(handler: Any) -> Callable[[bytes], Any]:
    """A decoder that hands a failure on: raised inside gRPC, it would be UNKNOWN and a trace in the log."""

    def decode(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return _Undecodable()

    return decode


def _unary_behaviour(inner: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def behaviour(request: Any, context: Context) -> Any:
        await _require_decoded(request, context)
        async with error_edge(context):
            return await inner(request, context)

    return behaviour


def _stream_behaviour(inner: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[None]]:
    async def behaviour(request: Any, context: Context) -> None:
        await _require_decoded(request, context)
        async with error_edge(context), aclosing(inner(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return behaviour


async def _require_decoded(request: Any, context: Context) -> None:
    if isinstance(request, _Undecodable):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be decoded as this method's message")


async def _abort(context: Context, status: Status) -> None:
    await context.abort(status.code, status.message, status.trailers)


def _call_is_cancelled() -> bool:
    # gRPC cancels the call's task when the client leaves, the deadline passes or the server's grace is over. Its
    # context.cancelled() tells only of the first.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
