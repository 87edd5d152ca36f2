"""The `mini-infer` command as a process of its own, in a pipe or on a terminal, beside a server in this process."""

import asyncio
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

COMMAND = (sys.executable, "-m", "mini_infer.client")
OFF = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The only line of standard error."""
        (line,) = self.stderr.splitlines()
        return line


async def mini_infer(*arguments: str, address: str = "", stdin: bytes = b"", **environment: str) -> Outcome:
    """Runs the command to its end, in pipes."""
    process = await start(*arguments, address=address, **environment)
    stdout, stderr = await process.communicate(stdin)
    return Outcome(process.returncode, stdout.decode(), stderr.decode())


async def start(*arguments: str, address: str = "", **environment: str) -> asyncio.subprocess.Process:
    """Starts the command, in pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, env=_environment(address, environment), stdin=pipe, stdout=pipe, stderr=pipe
    )


class Terminal:
    """What a person sees and types: the command on a pseudo-terminal, without echo."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._seen = ""

    def type(self, line: str) -> None:
        os.write(self._descriptor, line.encode())

    async def until(self, text: str) -> str:
        """Reads on until the text is there; all that came up to its end. The test's own time limit ends a wait."""
        while text not in self._seen:
            self._seen += await self._read() or self._fail(text)
        before, _, self._seen = self._seen.partition(text)
        return before + text

    async def interrupt_until(self, text: str) -> None:
        """Presses Ctrl-C, again where it fell between a prompt and the wait for input (a gap in CPython's input())."""
        seen = asyncio.create_task(self.until(text))
        while not seen.done():
            self.process.send_signal(signal.SIGINT)
            await asyncio.wait({seen}, timeout=3)
        await seen

    async def rest(self) -> str:
        """Waits for the end; all that came until then."""
        while more := await self._read():
            self._seen += more
        await self.process.wait()
        return self._seen

    async def _read(self) -> str:
        """Some more; nothing once the process has ended and all is read."""
        try:
            return (await asyncio.to_thread(os.read, self._descriptor, 65536)).decode()
        except OSError:  # Linux says EIO for the end
            return ""

    def _fail(self, text: str) -> str:
        raise AssertionError(f"the command ended without {text!r}: {self._seen!r}")


@asynccontextmanager
async def on_terminal(*arguments: str, address: str, **environment: str) -> AsyncIterator[Terminal]:
    """The command on a pseudo-terminal of 80 columns."""
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    environment = {"TERM": "xterm", **environment}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, env=_environment(address, environment), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


def _environment(address: str, changes: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OFF}
    return {**kept, "MINI_INFER_ADDRESS": address or "127.0.0.1:1", "PYTHONWARNINGS": "error", **changes}
