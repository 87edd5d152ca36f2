"""What can go wrong with a call, as one tree: the client's mirror of the server's. Knows no call and no channel.

MiniInferError
├── InvalidArgument         the caller's fault; names the fields
├── NotFound
│   ├── ModelNotFound
│   └── EngineNotFound
├── Overloaded              try again later
│   ├── QueueFull
│   ├── QuotaExceeded
│   ├── QueueTimeout        waited in the queue longer than max_queue_duration_s
│   └── SlowReader          this side did not read its stream
├── Unavailable             try again, perhaps elsewhere
│   ├── Draining
│   ├── NoReadyEngine
│   ├── EngineFailed        the engine died under the call
│   └── ServerUnreachable   no server answered, or the connection broke
├── DeadlineExceeded
├── StreamFailed            this call alone went wrong
│   └── OutOfMemory
├── Unauthenticated
├── PermissionDenied
├── Unimplemented           the server does not know the method
├── MessageTooLarge         gRPC's own limit, not the queue's
├── ProtocolViolation       the server sent what the contract forbids
│   └── Truncated           the stream ended well, but without its last event
└── ClientClosed            the client is not open (any more)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A wrong field: its path in the request, as in ``sampling.top_p``, and what is wrong with it."""

    field: str
    description: str


class MiniInferError(Exception):
    """Base of the tree, and the class of statuses that have none of their own.

    ``reason`` is the server's fixed word (ErrorInfo), empty where the failure is not the server's. What is not known
    is empty or None: of a call that this side gave up, the server's trailers never arrive.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        code: grpc.StatusCode | None = None,
        retry_after_s: float | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.code = code
        self.retry_after_s = retry_after_s  # from now, in seconds; negative: not at all
        self.field_violations = field_violations
        self.request_id = ""  # the server's own id of the generation
        self.engine_id = ""
        self.time_to_first_token_s: float | None = None
        self.generated_tokens: int | None = None
        self.text = ""  # what a stream had delivered before
        self.num_attempts = 1  # how often the call was tried


class InvalidArgument(MiniInferError):
    """A field of the request is wrong; ``field_violations`` names it."""

    def __str__(self) -> str:
        return "; ".join(f"{wrong.field}: {wrong.description}" for wrong in self.field_violations) or self.message


class NotFound(MiniInferError):
    """Something that this server does not have."""


class ModelNotFound(NotFound):
    """The model is not served here."""


class EngineNotFound(NotFound):
    """The pinned engine is not here."""


class Overloaded(MiniInferError):
    """Too much work at the moment."""


class QueueFull(Overloaded):
    """The queue of the model holds no more."""


class QuotaExceeded(Overloaded):
    """The caller's own share is used up."""


class QueueTimeout(Overloaded):
    """The generation waited in the queue longer than it was allowed to."""


class SlowReader(Overloaded):
    """The stream was not read fast enough, so the server ended it."""


class Unavailable(MiniInferError):
    """Not here, not now."""


class Draining(Unavailable):
    """The server is stopping."""


class NoReadyEngine(Unavailable):
    """No engine of the model is ready: still loading, or all failed."""


class EngineFailed(Unavailable):
    """The engine died under the call."""


class ServerUnreachable(Unavailable):
    """No server answered, or the connection broke."""


class DeadlineExceeded(MiniInferError):
    """The deadline passed, or the server saw that it cannot be met."""


class StreamFailed(MiniInferError):
    """This call alone went wrong; the engine goes on."""


class OutOfMemory(StreamFailed):
    """The memory that this call needs could not be had; the engine goes on."""


class Unauthenticated(MiniInferError):
    """The server wants to know who calls."""


class PermissionDenied(MiniInferError):
    """The server knows who calls and says no."""


class Unimplemented(MiniInferError):
    """The server does not know the method: another version, or no mini-infer server at all."""


class MessageTooLarge(MiniInferError):
    """A message is larger than gRPC was told to carry. Not a matter of load: trying again cannot help."""


class ProtocolViolation(MiniInferError):
    """The server sent what the contract forbids."""


class Truncated(ProtocolViolation):
    """The call ended with status OK, but its last event is missing: the answer was cut off on the way."""


class ClientClosed(MiniInferError):
    """The client was used outside its ``async with`` block, or closed during the call."""
