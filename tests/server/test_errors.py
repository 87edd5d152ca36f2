"""The table from exception to status, and what of it reaches a client."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from mini_infer.engines import errors
from mini_infer.server.errors import RETRY_PUSHBACK_KEY, STATUS_DETAILS_KEY, Status, status_of

Code = grpc.StatusCode

ROWS = [
    (errors.InvalidRequest("sampling.top_p", "too high"), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    (errors.InvalidRequest("prompt", "long", "PROMPT_TOO_LONG"), Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
    (errors.NotFound("no such model", "MODEL_NOT_FOUND"), Code.NOT_FOUND, "MODEL_NOT_FOUND"),
    (errors.NotFound("no such engine", "ENGINE_NOT_FOUND"), Code.NOT_FOUND, "ENGINE_NOT_FOUND"),
    (errors.QueueFull("full", 2.5), Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (errors.QueueTimeout("waited"), Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT"),
    (errors.Draining("bye"), Code.UNAVAILABLE, "DRAINING"),
    (errors.NoReadyEngine("none"), Code.UNAVAILABLE, "NO_READY_ENGINE"),
    (errors.EngineFailed("died"), Code.UNAVAILABLE, "ENGINE_FAILED"),
    (errors.DeadlineExceeded("late"), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (errors.StreamFailed("NaN"), Code.INTERNAL, "STREAM_FAILED"),
    (errors.OutOfMemory("large"), Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY"),
]


def details(status: Status) -> status_pb2.Status:
    return status_pb2.Status.FromString(dict(status.trailers)[STATUS_DETAILS_KEY])


def unpacked(status: Status, kind: type) -> list:
    found = []
    for packed in details(status).details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


@pytest.mark.parametrize(("error", "code", "reason"), ROWS, ids=[reason for _, _, reason in ROWS])
def test_each_error_has_its_code_and_reason(error: errors.MiniInferError, code: Code, reason: str) -> None:
    status = status_of(error)
    (info,) = unpacked(status, error_details_pb2.ErrorInfo)
    assert (status.code, info.reason, info.domain) == (code, reason, "mini-infer")
    assert details(status).code == code.value[0]
    assert details(status).message == status.message, "grpcio-status refuses details that differ from the message"
    retries = isinstance(error, errors.Overloaded | errors.Unavailable)
    assert len(unpacked(status, error_details_pb2.RetryInfo)) == retries
    assert (RETRY_PUSHBACK_KEY in dict(status.trailers)) == retries
    assert len(unpacked(status, error_details_pb2.BadRequest)) == isinstance(error, errors.InvalidRequest)


def test_a_bad_field_is_named_twice_for_people_and_for_programs() -> None:
    status = status_of(errors.InvalidRequest("sampling.top_p", "must be above 0 and at most 1, not 2"))
    (bad,) = unpacked(status, error_details_pb2.BadRequest)
    (violation,) = bad.field_violations
    assert violation.field == "sampling.top_p"
    assert violation.description == "must be above 0 and at most 1, not 2"
    assert status.message == "sampling.top_p: must be above 0 and at most 1, not 2"


def test_the_time_to_the_next_try_is_told_in_both_places() -> None:
    status = status_of(errors.QueueFull("full", 2.5))
    (retry,) = unpacked(status, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert dict(status.trailers)[RETRY_PUSHBACK_KEY] == "2500"


def test_there_is_no_pushback_after_the_header() -> None:
    status = status_of(errors.QueueTimeout("waited"), header_sent=True)
    assert RETRY_PUSHBACK_KEY not in dict(status.trailers)
    assert unpacked(status, error_details_pb2.RetryInfo)


def test_trailers_of_the_caller_ride_along() -> None:
    assert ("mini-infer-request-id", "7") in status_of(
        errors.StreamFailed("x"), trailers=(("mini-infer-request-id", "7"),)
    ).trailers


def test_what_is_not_ours_says_nothing_of_itself() -> None:
    status = status_of(ZeroDivisionError("/home/secret/path"))
    assert status.code is Code.INTERNAL
    assert "secret" not in str(status)
    assert unpacked(status, error_details_pb2.ErrorInfo)[0].reason == "INTERNAL"


@pytest.mark.parametrize("text", ["x" * 200_000, "é" * 200_000, "\N{GRINNING FACE}" * 200_000, "a\n" * 100_000])
def test_long_messages_are_cut_to_what_metadata_can_carry(text: str) -> None:
    status = status_of(errors.InvalidRequest("chat.messages[0].role" * 50, text))
    assert len(dict(status.trailers)[STATUS_DETAILS_KEY]) < 4096
    assert len(status.message.encode()) <= 768
    assert status.message.endswith("…")
    assert "\n" not in status.message


def test_short_messages_are_not_touched() -> None:
    assert status_of(errors.StreamFailed("nothing to cut")).message == "nothing to cut"


def test_text_that_cannot_be_encoded_does_not_stop_the_status() -> None:
    assert status_of(errors.StreamFailed("broken \ud83d text")).message == "broken ? text"
