"""What can be typed: commands and their flags. Does nothing itself; each command's module is imported when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mini_infer.client.cli.flags import takes_generation_flags
from mini_infer.client.cli.run import leave, run

app = typer.Typer(
    help="Stream text from a mini-infer server.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Address = Annotated[str, typer.Option(envvar="MINI_INFER_ADDRESS", help="The server, as host:port.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON lines.")]
Timeout = Annotated[float | None, typer.Option(min=0, help="Seconds for the whole call; no limit by default.")]
Attempts = Annotated[int, typer.Option(min=1, help="How often to ask a server that is busy or away; 1 asks once.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for the server to be ready, before all else.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ATTEMPTS = 3


def _show_version(wanted: bool) -> None:
    if wanted:
        from mini_infer.client.client import version

        print(f"mini-infer {version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Stream text from a mini-infer server."""


@app.command()
@takes_generation_flags
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; - or nothing reads it from a pipe.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Lay the prompt out as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt; implies --chat.")] = None,
    json: Json = False,
    wait: Wait = 0,
    timeout: Timeout = None,
    max_attempts: Attempts = DEFAULT_ATTEMPTS,
    address: Address = DEFAULT_ADDRESS,
    options: dict[str, Any],
) -> None:
    """Generate one answer, written to standard output as it is made.

    It ends with a line break, one of ours if need be. A summary follows on standard error. One line break at the end of
    a piped prompt is dropped.
    """
    from mini_infer.client import Client
    from mini_infer.client.cli.generate import check_output, generate, request_input

    run(
        lambda: generate(
            Client(address, max_attempts=max_attempts),
            {**check_output(options, as_json=json), **request_input(prompt, chat, system)},
            as_json=json,
            wait_s=wait,
            timeout_s=timeout,
        ),
        address,
    )


@app.command()
@takes_generation_flags
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="A system message for the conversation.")] = None,
    wait: Wait = 0,
    timeout: Timeout = None,
    max_attempts: Attempts = DEFAULT_ATTEMPTS,
    address: Address = DEFAULT_ADDRESS,
    options: dict[str, Any],
) -> None:
    """Talk with the model. Ctrl-C stops an answer, /reset begins anew, Ctrl-D or /exit leaves."""
    from mini_infer.client import Client
    from mini_infer.client.cli.chat import chat
    from mini_infer.client.cli.generate import check_output

    leave(
        lambda: chat(
            Client(address, max_attempts=max_attempts),
            check_output(options, as_json=False),
            system=system,
            wait_s=wait,
            timeout_s=timeout,
        ),
        address,
    )


@app.command()
def health(
    service: Annotated[str, typer.Option(help='What to ask for: "" is ready, "mini_infer.live" is alive.')] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Go on and show every change.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait; 3 by default, without end for --watch.")
    ] = None,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Ask whether the server is ready: exit status 0 if it is SERVING, else 1."""
    from mini_infer.client.cli.health import health

    run(lambda: health(address, service, watch=watch, timeout_s=timeout), address)


@app.command()
def engines(json: Json = False, address: Address = DEFAULT_ADDRESS) -> None:
    """Show the engines as they are now."""
    from mini_infer.client.cli.listings import show_engines

    run(lambda: show_engines(address, as_json=json), address)


@app.command()
def models(json: Json = False, address: Address = DEFAULT_ADDRESS) -> None:
    """Show the served models."""
    from mini_infer.client.cli.listings import show_models

    run(lambda: show_models(address, as_json=json), address)
