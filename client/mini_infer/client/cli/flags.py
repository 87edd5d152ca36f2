"""The flags that shape a generation, each written once: keywords of `Client.stream` that a command line can hold."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer


def _flag(kind: Any, help_text: str, panel: str, *names: str) -> Any:
    option = typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)
    return Annotated[kind | None, option]


SAMPLING = "Sampling"
STOPPING = "Stopping"
OUTPUT = "Output"
PLACEMENT = "Where and when"

FLAGS: dict[str, Any] = {
    "model": _flag(str, "The served model; needed only where there are several.", PLACEMENT),
    "engine_id": _flag(str, "Only this engine.", PLACEMENT),
    "engine_kind": _flag(str, "Only engines of this kind: generate, replica, pipeline or scripted.", PLACEMENT),
    "session_id": _flag(str, "Prefer the engine that served this session before.", PLACEMENT),
    "request_id": _flag(
        str, "A label of your own, for the server's log and as a handle for CancelGeneration.", PLACEMENT
    ),
    "max_queue_duration_s": _flag(
        float,
        "Seconds to wait in the queue at most, in each attempt; 0: start at once or fail.",
        PLACEMENT,
        "--max-queue-duration",
    ),
    "temperature": _flag(float, "0 to 100; 0 is greedy.", SAMPLING),
    "top_p": _flag(float, "Above 0, at most 1.", SAMPLING),
    "top_k": _flag(int, "0 is off.", SAMPLING),
    "min_p": _flag(float, "0 to 1.", SAMPLING),
    "repetition_penalty": _flag(float, "Above 0, at most 100; 1 is off.", SAMPLING),
    "presence_penalty": _flag(float, "-2 to 2.", SAMPLING),
    "frequency_penalty": _flag(float, "-2 to 2.", SAMPLING),
    "seed": _flag(int, "The same seed gives the same answer.", SAMPLING),
    "max_new_tokens": _flag(int, "The most tokens of the answer.", STOPPING),
    "min_new_tokens": _flag(int, "No end counts before so many tokens.", STOPPING),
    "stop": _flag(list[str], "Stop at this text; may be given again.", STOPPING),
    "stop_token_ids": _flag(list[int], "Stop at this token; may be given again.", STOPPING, "--stop-token-id"),
    "ignore_eos": _flag(bool, "Run on past the model's own end.", STOPPING, "--ignore-eos"),
    "include_stop_string": _flag(bool, "Keep the text that stopped it.", STOPPING, "--include-stop-string"),
    "output_token_ids": _flag(bool, "Token ids too, in --json.", OUTPUT, "--output-token-ids"),
    "logprobs": _flag(bool, "Log-probabilities too, in --json.", OUTPUT, "--logprobs"),
    "top_logprobs": _flag(int, "So many alternatives to each token; needs --logprobs.", OUTPUT),
    "skip_special_tokens": _flag(
        bool, "Whether special tokens stay out of the text.", OUTPUT, "--skip-special-tokens/--show-special-tokens"
    ),
}


def takes_generation_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command all of `FLAGS`; it gets those that were typed as one dict, ``options``."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in FLAGS.items()
    ]

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        typed = {name: values.pop(name) for name in FLAGS}
        command(**values, options={name: value for name, value in typed.items() if value not in (None, [])})

    with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
    return with_flags
