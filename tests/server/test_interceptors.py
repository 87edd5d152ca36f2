"""The edge between handlers and gRPC, where a real channel gets there only by chance."""

import logging

import grpc
import pytest

from mini_infer.engines.errors import InvalidRequest
from mini_infer.server.interceptors import error_edge


class GoneContext:
    """A call whose client left at the very moment in which something is sent."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def abort(self, *_: object) -> None:
        await self.send_initial_metadata()

    async def send_initial_metadata(self, *_: object) -> None:
        self.num_sent += 1
        raise grpc.aio.InternalError('Failed "execute_batch"')


async def handle(context: GoneContext, *, is_refused: bool) -> None:
    """As the handler of a stream does it: behind its own edge and the interceptor's."""
    async with error_edge(context), error_edge(context):
        if is_refused:
            raise InvalidRequest("prompt", "is too long")
        await context.send_initial_metadata()


@pytest.mark.parametrize("is_refused", [True, False])
async def test_a_client_that_is_gone_gets_no_second_status_and_no_trace(
    is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = GoneContext()
    with pytest.raises(grpc.aio.InternalError):
        await handle(context, is_refused=is_refused)
    assert (context.num_sent, caplog.records) == (1, [])
