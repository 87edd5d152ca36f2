"""`mini-infer health`: the probe of containers and supervisors. Quick, quiet, and never repeated."""

from __future__ import annotations

from mini_infer.client import Client, DeadlineExceeded
from mini_infer.client.cli.run import FAILED, OK

TIMEOUT_S = 3.0
"""Shorter than the usual patience of whoever runs the probe."""


async def health(address: str, service: str, *, watch: bool, timeout_s: float | None) -> int:
    """Writes the health, once or at every change; the exit status tells the last one."""
    async with Client(address) as client:
        if watch:
            return await _watch(client, service, timeout_s)
        status = await client.health(service, timeout_s=TIMEOUT_S if timeout_s is None else timeout_s)
        print(status)
        return OK if status == "SERVING" else FAILED


async def _watch(client: Client, service: str, timeout_s: float | None) -> int:
    status = ""
    try:
        async for status in client.watch_health(service, timeout_s=timeout_s):
            print(status, flush=True)
    except DeadlineExceeded:  # asked for with --timeout
        if not status:
            raise
    return OK if status == "SERVING" else FAILED
