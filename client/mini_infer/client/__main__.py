"""The `mini-infer` command: hands over to `cli.app`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 called wrongly, 130 stopped by Ctrl-C."""
    _open_closed_streams()
    try:
        from mini_infer.client.cli.app import app

        app(prog_name="mini-infer")
    except KeyboardInterrupt:
        sys.exit(130)


def _open_closed_streams() -> None:
    """Gives the null device to standard streams that were closed: a socket would get their numbers, and their text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # as long as the process


if __name__ == "__main__":
    main()
