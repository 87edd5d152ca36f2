"""The one table from exception to gRPC status, with its details and trailers. Aborts nothing and logs nothing.

Details stay far below the 8 KiB that gRPC lets pass for certain: with more, a client sees "metadata size exceeds
limit" in place of the status. Hence long messages are cut, and a traceback is never part of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from mini_infer.engines.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MiniInferError,
    NotFound,
    OutOfMemory,
    Overloaded,
    Retryable,
    StreamFailed,
    Unavailable,
)

Metadata = tuple[tuple[str, str | bytes], ...]

DOMAIN = "mini-infer"
MAX_MESSAGE_BYTES = 768
MAX_FIELD_BYTES = 128

STATUS_DETAILS_KEY = "grpc-status-details-bin"
RETRY_PUSHBACK_KEY = "grpc-retry-pushback-ms"

CODES: dict[type[MiniInferError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StreamFailed: grpc.StatusCode.INTERNAL,
    MiniInferError: grpc.StatusCode.INTERNAL,
}
"""The nearest class in an error's line of ancestors decides."""


@dataclass(frozen=True, slots=True)
class Status:
    """What `ServicerContext.abort` takes."""

    code: grpc.StatusCode
    message: str
    trailers: Metadata


def status_of(error: Exception, *, trailers: Metadata = (), header_sent: bool = False) -> Status:
    """The status of any exception. One that is not ours becomes INTERNAL and says nothing of itself.

    The retry pushback is left out after the header: gRPC makes no retry of its own from there on, whatever it says.
    """
    if not isinstance(error, MiniInferError):
        error = MiniInferError("internal error; the server's log has the details")
    code = next(CODES[cls] for cls in type(error).__mro__ if cls in CODES)
    message = one_line(str(error), MAX_MESSAGE_BYTES)
    details = status_pb2.Status(code=code.value[0], message=message, details=_details(error))
    pushback = () if header_sent else _pushback(error)
    return Status(code, message, ((STATUS_DETAILS_KEY, details.SerializeToString()), *pushback, *trailers))


def one_line(text: str, max_bytes: int) -> str:
    """Text without line breaks, cut to a size, every character of which can be encoded."""
    line = " ".join(text[:max_bytes].split())
    encoded = line.encode("utf-8", "replace")
    if len(encoded) <= max_bytes and len(text) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len("…".encode())].decode("utf-8", "ignore") + "…"


def _details(error: MiniInferError) -> list[Any]:
    messages: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=one_line(error.field, MAX_FIELD_BYTES),
            description=one_line(error.message, MAX_MESSAGE_BYTES),
            reason=error.reason,
        )
        messages.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Retryable):
        messages.append(error_details_pb2.RetryInfo(retry_delay=_retry_delay(error)))
    return [_pack(message) for message in messages]


def _retry_delay(error: Retryable) -> Duration:
    delay = Duration()
    delay.FromMilliseconds(_retry_ms(error))
    return delay


def _pushback(error: MiniInferError) -> Metadata:
    if isinstance(error, Retryable):
        return ((RETRY_PUSHBACK_KEY, str(_retry_ms(error))),)
    return ()


def _retry_ms(error: Retryable) -> int:
    return max(0, round(error.retry_after_s * 1000))


def _pack(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
