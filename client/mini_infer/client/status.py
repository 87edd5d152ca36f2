"""The table from gRPC statuses to exceptions, keyed on ErrorInfo.reason; the mirror of the server's table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc import aio
from grpc_status import rpc_status

from mini_infer.client import errors

DOMAIN = "mini-infer"

BY_REASON: dict[str, type[errors.MiniInferError]] = {
    "MODEL_NOT_FOUND": errors.ModelNotFound,
    "ENGINE_NOT_FOUND": errors.EngineNotFound,
    "QUEUE_FULL": errors.QueueFull,
    "QUOTA": errors.QuotaExceeded,
    "QUEUE_TIMEOUT": errors.QueueTimeout,
    "SLOW_READER": errors.SlowReader,
    "DRAINING": errors.Draining,
    "NO_READY_ENGINE": errors.NoReadyEngine,
    "ENGINE_FAILED": errors.EngineFailed,
    "STREAM_FAILED": errors.StreamFailed,
    "OUT_OF_MEMORY": errors.OutOfMemory,
}

BY_CODE: dict[grpc.StatusCode, type[errors.MiniInferError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
}

_Number = TypeVar("_Number", int, float)
_Detail = TypeVar("_Detail", bound=Message)


def error_from_rpc(rpc_error: aio.AioRpcError) -> errors.MiniInferError:
    """The exception for a failed call, with all that its status details and trailers tell."""
    details = _details(rpc_error)
    info = _detail(details, error_details_pb2.ErrorInfo)
    reason = info.reason if info is not None and info.domain == DOMAIN else ""
    trailers = {key: value for key, value in rpc_error.trailing_metadata() or () if isinstance(value, str)}
    error = _error_class(rpc_error, reason)(
        _message(rpc_error, reason),
        reason=reason,
        code=rpc_error.code(),
        retry_after_s=_retry_after_s(details, trailers),
        field_violations=_field_violations(details),
    )
    error.request_id = trailers.get("mini-infer-request-id", "")
    error.engine_id = trailers.get("mini-infer-engine-id", "")
    ttft_ms = _number(float, trailers.get("mini-infer-ttft-ms"))
    error.time_to_first_token_s = None if ttft_ms is None else ttft_ms / 1e3
    error.generated_tokens = _number(int, trailers.get("mini-infer-generated-tokens"))
    return error


def _message(rpc_error: aio.AioRpcError, reason: str) -> str:
    """The server's words; for a deadline that gRPC kept there are only its own, which tell of streams and sockets."""
    if not reason and rpc_error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the deadline passed"
    return rpc_error.details() or rpc_error.code().name


def _error_class(rpc_error: aio.AioRpcError, reason: str) -> type[errors.MiniInferError]:
    """The class for a reason, known or not; without one the status is gRPC's own."""
    if reason in BY_REASON:
        return BY_REASON[reason]
    if not reason and rpc_error.code() is grpc.StatusCode.UNAVAILABLE:
        return errors.ServerUnreachable
    if not reason and "larger than max" in (rpc_error.details() or ""):
        return errors.MessageTooLarge
    return BY_CODE.get(rpc_error.code(), errors.MiniInferError)


def _details(rpc_error: aio.AioRpcError) -> Status:
    """The status details; empty where there are none or a proxy damaged them."""
    try:
        return rpc_status.from_call(rpc_error) or Status()
    except (ValueError, DecodeError):
        return Status()


def _detail(status: Status, kind: type[_Detail]) -> _Detail | None:
    for packed in status.details:
        detail = kind()
        if packed.Is(kind.DESCRIPTOR) and packed.Unpack(detail):
            return detail
    return None


def _field_violations(status: Status) -> tuple[errors.FieldViolation, ...]:
    bad_request = _detail(status, error_details_pb2.BadRequest)
    found: Iterable[error_details_pb2.BadRequest.FieldViolation] = bad_request.field_violations if bad_request else ()
    return tuple(errors.FieldViolation(wrong.field, wrong.description) for wrong in found)


def _retry_after_s(status: Status, trailers: dict[str, str]) -> float | None:
    """From RetryInfo, else from gRPC's own trailer (gRFC A6), whose negative numbers mean: do not."""
    retry_info = _detail(status, error_details_pb2.RetryInfo)
    if retry_info is not None and retry_info.HasField("retry_delay"):
        return float(retry_info.retry_delay.ToNanoseconds() / 1e9)
    pushback_ms = _number(int, trailers.get("grpc-retry-pushback-ms"))
    return None if pushback_ms is None else pushback_ms / 1e3


def _number(kind: Callable[[str], _Number], text: str | None) -> _Number | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None
