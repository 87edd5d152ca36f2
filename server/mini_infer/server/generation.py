"""One generation call, from its arrival to its line in the log. Knows the order of things; chooses no engine.

A refusal leaves before any header: after a header gRPC retries nothing. The header goes out as soon as the request
has proved good, so that a client sees it while its prompt is being worked on. Prompts are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator
from urllib.parse import quote

from mini_infer.engines.api import Delta, Finished, Started
from mini_infer.engines.errors import DeadlineExceeded, MiniInferError, StreamFailed
from mini_infer.server import convert_response
from mini_infer.server.call import Call
from mini_infer.server.convert_request import call_of
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.errors import Metadata, Status, status_of
from mini_infer.server.interceptors import Context, error_edge
from mini_infer.server.peer import caller_of
from mini_infer.server.stream import Stream
from mini_infer.v1 import generation_pb2 as pb

REQUEST_ID_KEY = "mini-infer-request-id"
ENGINE_ID_KEY = "mini-infer-engine-id"
TTFT_KEY = "mini-infer-ttft-ms"
NUM_TOKENS_KEY = "mini-infer-generated-tokens"

MAX_LOGGED_CHARACTERS = 128

DEADLINE_SLACK = 0.02
MIN_DEADLINE_SLACK_NS = 20_000_000
"""How much earlier than the deadline that reached the server the client's own may be: a share of its span, or this."""

_log = logging.getLogger(__name__)
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


class Generation:
    """A call of Generate or GenerateStream; one that must fit one message has `max_bytes`."""

    def __init__(
        self, dispatcher: Dispatcher, message: pb.GenerateRequest, context: Context, max_bytes: int | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._message = message
        self._context = context
        self._num_bytes_left = max_bytes
        self._key = uuid.uuid4().hex
        self._arrival_ns = time.monotonic_ns()
        self._arrival_wall_ns = time.time_ns()
        self._header_sent = False
        self._num_tokens = 0  # told to the client
        self._call: Call | None = None
        self._stream: Stream | None = None
        self._outcome: str | None = None  # None as long as the client may have left

    async def responses(self) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """The messages of the stream. Aborts the call where it fails; ends in one line of the log in any case."""
        try:
            async with error_edge(self._context, self._fail):
                self._call = self._read()
                async with self._dispatcher.enter(self._call) as self._stream:
                    await self._stream.prepare()
                    await self._context.send_initial_metadata(((REQUEST_ID_KEY, self._key),))
                    self._header_sent = True
                    async for event in self._stream:
                        response = self._response(self._call, self._stream, event)
                        self._take_room_for(response)
                        yield response
                    assert self._outcome, "a stream that goes well ends in Finished"
        finally:
            _log.info("%s", self._line())

    def _read(self) -> Call:
        remaining_s = self._context.time_remaining()
        return call_of(
            self._message,
            key=self._key,
            caller=caller_of(self._context.peer()),
            arrival_ns=self._arrival_ns,
            deadline_ns=None if remaining_s is None else self._arrival_ns + int(remaining_s * 1e9),
        )

    def _response(self, call: Call, stream: Stream, event: Started | Delta | Finished) -> pb.GenerateStreamResponse:
        match event:
            case Started():
                assert stream.served_by, "a started stream has an engine"
                return convert_response.started(event, stream.served_by, stream.timing, _prompt_tokens(stream))
            case Delta():
                message = convert_response.delta(event, call.request.output, stream.timing, self._num_tokens)
                self._num_tokens = event.cumulative_tokens
                return message
            case Finished():
                self._outcome = event.reason.value
                return convert_response.finished(event, stream.served_by, stream.timing, self._arrival_wall_ns)

    def _take_room_for(self, response: pb.GenerateStreamResponse) -> None:
        if self._num_bytes_left is not None:
            self._num_bytes_left -= response.ByteSize()
            if self._num_bytes_left < 0:
                raise StreamFailed("the answer is too large for one message; GenerateStream has no such limit")

    def _fail(self, error: Exception) -> Status:
        self._outcome = error.reason if isinstance(error, MiniInferError) else MiniInferError.reason
        return status_of(error, trailers=self._trailers(), header_sent=self._header_sent)

    def _trailers(self) -> Metadata:
        trailers = [(REQUEST_ID_KEY, self._key)]
        stream = self._stream
        if stream and stream.served_by:
            trailers.append((ENGINE_ID_KEY, quote(stream.served_by.engine_id)))  # metadata is ASCII, names need not be
        if stream and stream.timing.time_to_first_token_ns is not None:
            trailers.append((TTFT_KEY, _ms(stream.timing.time_to_first_token_ns)))
        return (*trailers, (NUM_TOKENS_KEY, str(self._num_tokens)))

    def _why_left(self) -> str:
        """A client whose deadline passed leaves; gRPC rounds its timeout up on the way here, so ours is a bit later."""
        deadline_ns = self._call.request.deadline_ns if self._call else None
        if deadline_ns is None:
            return "disconnected"
        slack_ns = max(MIN_DEADLINE_SLACK_NS, int((deadline_ns - self._arrival_ns) * DEADLINE_SLACK))
        return DeadlineExceeded.reason if deadline_ns - slack_ns <= time.monotonic_ns() else "disconnected"

    def _line(self) -> str:
        stream, call = self._stream, self._call
        timing = stream.timing if stream else None
        facts = {
            "id": self._key,
            "label": call.label if call else "",
            "model": self._dispatcher.served_name(call.model) if call else "",
            "engine": stream.served_by.engine_id if stream and stream.served_by else "",
            "outcome": self._outcome or self._why_left(),
            "prompt_tokens": _prompt_tokens(stream),
            "tokens": stream.num_tokens if stream else 0,
            "queue_ms": _ms(timing.queue_ns if timing else None),
            "ttft_ms": _ms(timing.time_to_first_token_ns if timing else None),
            "total_ms": _ms(time.monotonic_ns() - self._arrival_ns),
        }
        return "generation " + " ".join(f"{name}={_quoted(str(value))}" for name, value in facts.items())


def _prompt_tokens(stream: Stream | None) -> int:
    return len(stream.prepared.prompt_ids) if stream and stream.prepared else 0


def _ms(span_ns: int | None) -> str:
    return "-" if span_ns is None else f"{span_ns / 1e6:.3f}"


def _quoted(value: str) -> str:
    """A value that cannot be taken for another field or another line of the log."""
    value = value[:MAX_LOGGED_CHARACTERS]
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
