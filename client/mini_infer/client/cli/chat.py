"""`mini-infer chat`: a conversation. Reads lines while no loop runs, so that Ctrl-C means the right thing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from mini_infer.client import Client, Message, MiniInferError
from mini_infer.client.cli.generate import retry_teller, wait_ready, write_answer
from mini_infer.client.cli.output import Spinner, cancelled_summary, say, summary, tolerate_any_text
from mini_infer.client.cli.run import FAILED, OK, error_line


class Conversation:
    """The messages so far: pairs of user and assistant, after at most one system message.

    A turn that fails or is broken off leaves no trace, so the next one starts from a conversation that a chat
    template accepts.
    """

    def __init__(self, client: Client, options: dict[str, Any], system: str | None, timeout_s: float | None) -> None:
        self._client = client
        self._options = options
        self._timeout_s = timeout_s
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = list(self._opening)

    async def say(self, text: str) -> None:
        """One turn: writes the answer and remembers both. Raises `MiniInferError` or CancelledError."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        spinner = Spinner()
        stream = self._client.stream(
            messages=messages, timeout_s=self._timeout_s, on_retry=retry_teller(spinner), **self._options
        )
        try:
            with spinner:
                await write_answer(stream, spinner)
        except asyncio.CancelledError:
            say(f"{cancelled_summary(stream.first_token, stream.num_tokens)}; this turn is forgotten", dim=True)
            raise
        self.messages = [*messages, {"role": "assistant", "content": stream.result.text}]
        say(summary(stream), dim=True)


def chat(client: Client, options: dict[str, Any], *, system: str | None, wait_s: float, timeout_s: float | None) -> int:
    """Talks until the input ends; returns the exit status. A failed turn counts only where nobody watches."""
    tolerate_any_text()
    conversation = Conversation(client, options, system, timeout_s)
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())
        try:
            runner.run(_wait(client, wait_s))
            return _talk(conversation, runner, client.address)
        finally:
            runner.run(client.close())


async def _wait(client: Client, wait_s: float) -> None:
    with Spinner() as spinner:
        await wait_ready(client, wait_s, spinner)


def _talk(conversation: Conversation, runner: asyncio.Runner, address: str) -> int:
    interactive = sys.stdin.isatty()
    status = OK
    for line in _lines(interactive):
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line == "/help":
            say("/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer", dim=True)
        elif line.startswith("/"):
            say(f"no command {line}; /help shows what there is")
        elif line:
            try:
                runner.run(conversation.say(line))
            except MiniInferError as error:
                say(error_line(error, address))
                status = status if interactive else FAILED
            except KeyboardInterrupt:
                if not interactive:
                    raise
    return status


def _lines(interactive: bool) -> Iterator[str]:
    """What is typed or piped, line by line; Ctrl-C throws a half-typed line away."""
    if interactive:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # line editing for input()
    prompt = "> " if interactive and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            say("\nCtrl-D or /exit leaves")
            continue
        yield line.strip()
