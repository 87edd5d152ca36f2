"""`mini-infer generate`: one answer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from mini_infer.client import Client, Engine, GenerationStream, Message, MiniInferError
from mini_infer.client.cli.output import Spinner, say, summary, tolerate_any_text, write, write_json
from mini_infer.client.cli.run import OK, UsageError
from mini_infer.client.stream import OnRetry


def request_input(prompt: str | None, as_chat: bool, system: str | None) -> dict[str, Any]:
    """The prompt, or the conversation made of it, as keywords of `Client.stream`. Raises `UsageError`."""
    text = _piped() if prompt in (None, "-") else prompt
    if not as_chat and system is None:
        return {"prompt": text}
    said: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*said, {"role": "user", "content": text}]}


def check_output(options: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """The options, where the output can hold what they ask for. Raises `UsageError`."""
    for name, flag in (("logprobs", "--logprobs"), ("output_token_ids", "--output-token-ids")):
        if options.get(name) and not as_json:
            raise UsageError(f"{flag} needs `mini-infer generate --json`: plain text has no place for it")
    return options


async def generate(
    client: Client, options: dict[str, Any], *, as_json: bool, wait_s: float, timeout_s: float | None
) -> int:
    """Writes one answer; returns the exit status."""
    tolerate_any_text()
    spinner = Spinner()
    async with client:
        try:
            stream = client.stream(timeout_s=timeout_s, on_retry=retry_teller(spinner), **options)
            with spinner:
                await wait_ready(client, wait_s, spinner)
                if as_json:
                    await _write_events(stream, spinner)
                else:
                    await write_answer(stream, spinner)
        except MiniInferError as error:
            if as_json:
                write_json(_error_event(error))
            raise
    say(summary(stream), dim=True)
    return OK


async def wait_ready(client: Client, wait_s: float, spinner: Spinner) -> None:
    """Waits for the server as long as was asked for, and says what for."""

    def show(engines: Sequence[Engine]) -> None:
        states = ", ".join(f"{engine.engine_id} ({engine.state})" for engine in engines)
        spinner.show(f"waiting for the model: {states}" if states else f"waiting for a server at {client.address}")

    if wait_s > 0:
        await client.wait_ready(wait_s, show)


def retry_teller(spinner: Spinner) -> OnRetry:
    """Says that there will be another attempt, and why; true still while that one runs."""

    def show(error: MiniInferError, wait_s: float) -> None:
        why = " ".join(str(error).split())
        spinner.show(f"trying again (attempt {error.num_attempts + 1}, after a wait of {wait_s:.1f} s): {why}")

    return show


async def write_answer(stream: GenerationStream, spinner: Spinner) -> None:
    """Writes the text as it comes. It ends with a line break, however it ends: what follows is not part of it."""
    try:
        async with stream:
            await _follow_to_start(stream, spinner)
            async for delta in stream:
                spinner.stop()
                write(delta.text)
    finally:
        spinner.stop()
        if stream.text and not stream.text.endswith("\n"):
            write("\n")


async def _write_events(stream: GenerationStream, spinner: Spinner) -> None:
    async with stream:
        await _follow_to_start(stream, spinner)
        if stream.started is not None:
            write_json({"event": "started", "request_id": stream.request_id, **dataclasses.asdict(stream.started)})
        async for delta in stream:
            spinner.stop()
            write_json({"event": "delta", **dataclasses.asdict(delta)})
    attempts = {"num_attempts": stream.num_attempts, "retries_s": stream.retries_s}
    write_json({"event": "finished", **dataclasses.asdict(stream.result), **attempts})


async def _follow_to_start(stream: GenerationStream, spinner: Spinner) -> None:
    spinner.show(f"waiting in the queue, request {stream.request_id}")
    started = await stream.wait_started()
    if started is not None:
        spinner.show(f"reading {started.prompt_tokens} tokens on engine {started.engine.engine_id}")


def _error_event(error: MiniInferError) -> dict[str, Any]:
    return {
        "event": "error",
        "error": type(error).__name__,
        "message": str(error),
        "reason": error.reason,
        "code": error.code.name if error.code is not None else "",
        "retry_after_s": error.retry_after_s,
        "fields": [violation.field for violation in error.field_violations],
        "request_id": error.request_id,
        "engine_id": error.engine_id,
        "time_to_first_token_s": error.time_to_first_token_s,
        "generated_tokens": error.generated_tokens,
        "num_attempts": error.num_attempts,
    }


def _piped() -> str:
    """Standard input, whole, without the line break that `echo` adds."""
    if sys.stdin.isatty():
        raise UsageError("give a prompt, as an argument or through a pipe")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on standard input is not UTF-8 (byte {error.start})") from error
    return text.removesuffix("\n").removesuffix("\r")
