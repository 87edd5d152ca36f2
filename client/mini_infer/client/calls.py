"""Where gRPC's ways of failing become ours: one call at a time, no repeating."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from grpc import aio

from mini_infer.client.errors import ClientClosed
from mini_infer.client.status import error_from_rpc


@contextmanager
def our_errors(call: aio.Call) -> Iterator[None]:
    """Raises our exceptions in place of gRPC's.

    A call that this side cancelled raises CancelledError in whoever reads it, as if that task had been cancelled
    (grpc.aio). Where the task was not, the channel was closed under the call.
    """
    try:
        yield
    except aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if call.cancelled() and task is not None and not task.cancelling():
            raise ClientClosed("the client was closed during the call") from None
        raise
