"""The `mini-infer` command: hands over to `cli.app`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 called wrongly, 130 stopped by Ctrl-C."""
    try:
        from mini_infer.client.cli.app import app

        app(prog_name="mini-infer")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
