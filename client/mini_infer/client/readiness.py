"""Waiting for a server to come up. Asks again and again, because there may be no server to watch yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mini_infer.client.errors import DeadlineExceeded, NoReadyEngine, Unavailable
from mini_infer.client.results import Engine

POLL_S = 0.25

ATTEMPT_TIMEOUT_S = 5.0
"""A server that does not answer for so long is asked again."""


class Server(Protocol):
    """What is asked of the client here."""

    async def health(self, service: str = "", *, timeout_s: float | None = 30.0) -> str:
        """The health of a service."""

    async def engines(self, *, timeout_s: float | None = 30.0) -> tuple[Engine, ...]:
        """The engines as they are now."""


async def wait_ready(server: Server, timeout_s: float, on_progress: Callable[[Sequence[Engine]], None]) -> None:
    """Returns once the server's health is SERVING. Raises `DeadlineExceeded` or `NoReadyEngine`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        engines, missing = await _look(server, min(max(left_s, POLL_S), ATTEMPT_TIMEOUT_S))
        if missing is None:
            return
        on_progress(engines)
        if engines and all(engine.state == "failed" for engine in engines):
            raise NoReadyEngine("; ".join(f"engine {engine.engine_id} failed: {engine.failure}" for engine in engines))
        if left_s <= POLL_S:
            raise DeadlineExceeded(f"the server was not ready within {timeout_s:g} s: {missing}")
        await asyncio.sleep(POLL_S)


async def _look(server: Server, timeout_s: float) -> tuple[Sequence[Engine], str | None]:
    """The engines, and what is missing for readiness; None where nothing is."""
    try:
        status = await server.health(timeout_s=timeout_s)
        if status == "SERVING":
            return (), None
        engines = await server.engines(timeout_s=timeout_s)
    except (Unavailable, DeadlineExceeded) as error:
        return (), str(error)
    states = ", ".join(f"{engine.engine_id} is {engine.state}" for engine in engines)
    return engines, states or f"its health is {status}"
