"""Starts a server with the default model on a free loopback port, streams one answer to the terminal, stops it all.

Knows the two commands only by what they print and return. A step that fails is named, with the server's last lines.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

QUESTION = "What is the capital of France?"
START_LIMIT_S = 180  # importing torch from a cold disk, and turning the default model into its fast form once
ANSWER_LIMIT_S = 60
STOP_LIMIT_S = 20  # nothing runs any more, so the server's grace is not used
COMMANDS = Path(sys.executable).parent


class Failed(Exception):
    """A step of the demo that did not work; its text is for the person at the terminal."""


def main() -> int:
    """Run the demo; 0 when the answer was streamed and the server stopped cleanly."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped then too
    with tempfile.TemporaryFile("w+") as log:
        print(
            "demo: start mini-infer-server with the default model (the first start takes about 30 s longer)", flush=True
        )
        server = subprocess.Popen(
            [COMMANDS / "mini-infer-server", "--host", "127.0.0.1", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            address = wait_until_serving(server)
            ask(address)
            stop(server)
        except Failed as failed:
            print(f"demo: FAILED: {failed}", file=sys.stderr)
            server.kill()
            server.wait()
            show_last_lines(log)
            return 1
        finally:
            server.kill()
            server.wait()
    return 0


def wait_until_serving(server: subprocess.Popen[str]) -> str:
    """The server's address, once it says that it serves. Raises `Failed` when it ends or takes too long."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=pass_lines, args=(server.stdout, lines), daemon=True).start()
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Failed(f"starting the server: not serving after {START_LIMIT_S} s") from None
        if line is None:
            raise Failed(f"starting the server: it ended with status {server.wait()}")
        if " serving on " in line:
            return line.rpartition(" ")[2].strip()


def pass_lines(source: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    """Read a pipe to its end, so that its writer never blocks; None marks the end."""
    for line in source or ():
        lines.put(line)
    lines.put(None)


def ask(address: str) -> None:
    """Stream one answer from the server at ``address`` to the terminal, with the client's summary line under it."""
    print(f'demo: mini-infer generate --chat "{QUESTION}"', flush=True)
    command = [str(COMMANDS / "mini-infer"), "generate", "--address", address, "--chat", QUESTION]
    try:
        told = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=ANSWER_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"asking the server: no whole answer after {ANSWER_LIMIT_S} s") from None
    if told.returncode != 0:
        raise Failed(f"asking the server: mini-infer ended with status {told.returncode}: {told.stderr.strip()}")
    print(told.stderr.strip(), flush=True)


def stop(server: subprocess.Popen[str]) -> None:
    """Ask the server to stop, and see that it does so in time and with status 0."""
    server.terminate()
    try:
        status = server.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"stopping the server: still there after {STOP_LIMIT_S} s") from None
    if status != 0:
        raise Failed(f"stopping the server: it ended with status {status}")


def show_last_lines(log: IO[str], num_lines: int = 20) -> None:
    """Print the end of the server's log."""
    log.seek(0)
    for line in log.readlines()[-num_lines:]:
        print(f"  server: {line.rstrip()}", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
