"""What can go wrong with a stream or an engine, as one tree. Knows no gRPC: the server's table gives the statuses.

MiniInferError
├── InvalidRequest          the caller's fault; names the field
├── NotFound                a model or an engine that is not served here
├── Retryable               says when to try again
│   ├── Overloaded          here
│   │   ├── QueueFull
│   │   └── QueueTimeout
│   └── Unavailable         perhaps elsewhere
│       ├── Draining
│       ├── NoReadyEngine
│       └── EngineFailed    the engine died under the stream
├── DeadlineExceeded        the caller's own deadline passed
├── StreamFailed            this stream alone went wrong
│   └── OutOfMemory
└── LoadError               the engine never came up
    └── NotExact            this engine cannot serve this model exactly; another kind can
"""

from __future__ import annotations


class MiniInferError(Exception):
    """Base of the tree. ``message`` is for the caller, ``reason`` a word for programs."""

    reason: str = "INTERNAL"  # fixed for each class, but for the two that take it from their caller

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message  # args, which pickling needs, may hold more


class InvalidRequest(MiniInferError):
    """A field of the request is wrong. ``field`` is its path in GenerateRequest, as in ``sampling.top_p``."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, reason: str = "INVALID_FIELD") -> None:
        super().__init__(message)
        self.args = (field, message, reason)
        self.field = field
        self.reason = reason  # may be more precise than the class, e.g. PROMPT_TOO_LONG

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class NotFound(MiniInferError):
    """A model or an engine is not here. ``reason`` is MODEL_NOT_FOUND or ENGINE_NOT_FOUND."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.args = (message, reason)
        self.reason = reason


class Retryable(MiniInferError):
    """It may go well later. ``retry_after_s`` is when a new try is worth it, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s


class Overloaded(Retryable):
    """Too much work at the moment."""


class QueueFull(Overloaded):
    """The bounded queue of the model holds no more."""

    reason = "QUEUE_FULL"


class QueueTimeout(Overloaded):
    """The stream waited in the queue longer than its ``max_queue_duration``."""

    reason = "QUEUE_TIMEOUT"


class Unavailable(Retryable):
    """Not here, not now."""


class Draining(Unavailable):
    """The server is stopping."""

    reason = "DRAINING"


class NoReadyEngine(Unavailable):
    """No engine of the model is ready: still loading, or all failed."""

    reason = "NO_READY_ENGINE"


class EngineFailed(Unavailable):
    """The engine died under the stream: an exception in a step, a device error, or no progress."""

    reason = "ENGINE_FAILED"


class DeadlineExceeded(MiniInferError):
    """The caller's deadline passed."""

    reason = "DEADLINE_EXCEEDED"


class StreamFailed(MiniInferError):
    """This stream alone went wrong, for example its logits were not numbers; the engine goes on."""

    reason = "STREAM_FAILED"


class OutOfMemory(StreamFailed):
    """This stream's own allocation failed; the engine goes on."""

    reason = "OUT_OF_MEMORY"


class LoadError(MiniInferError):
    """The engine could not be built: a missing file, an absent device, a shape that does not fit."""

    reason = "LOAD_FAILED"


class NotExact(LoadError):
    """The packed path would not give this model's own answers. `GenerateEngine` serves it."""


def one_line(error: BaseException, max_chars: int = 500, *, named: bool = False) -> str:
    """What an exception says, as one line for a message of ours; its class where it says nothing.

    ``named``: its class before that, for exceptions that nobody foresaw and whose words alone may tell little.
    """
    name, said = type(error).__name__, " ".join(str(error).split())
    return (f"{name}: {said}" if named and said else said or name)[:max_chars]
