"""`mini-infer-server` as a process of its own, as a user runs it: on a free loopback port, stopped by a signal."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

TINY = ("--model", "tiny", "--load-format", "dummy", "--devices", "cpu")
"""Options of a server whose model is small, random and there at once."""


@dataclass(frozen=True)
class ServerProcess:
    """A running server and where it listens."""

    process: subprocess.Popen[str]
    address: str
    log: IO[str]

    def stop(self, timeout_s: float = 60) -> int:
        """Ask it to stop as an operator would; its exit status."""
        self.process.terminate()
        return self.process.wait(timeout_s)


@contextmanager
def running_server(*options: str) -> Iterator[ServerProcess]:
    """A server that serves. Fails with the server's own words where it ends before."""
    command = [sys.executable, "-m", "mini_infer.server", "--host", "127.0.0.1", "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield ServerProcess(process, wait_for_line(process, " serving on ", log), log)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def wait_for_line(process: subprocess.Popen[str], part: str, log: IO[str] | None = None) -> str:
    """The last word of the server's line that holds ``part``. The test's own time limit ends a wait in vain."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if part in line:
            return line.split()[-1]
    if log is not None:
        log.seek(0)
        seen += log.readlines()[-30:]
    raise AssertionError(f"the server ended without saying {part!r}:\n{''.join(seen)}")
