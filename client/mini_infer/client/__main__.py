"""The `mini-infer` command: sets up the process and hands over to `cli.app`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command and exits: 0 done, 1 failed, 2 called wrongly, 130 stopped by Ctrl-C."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what goes wrong reaches us as statuses; its log is noise here
    try:
        from mini_infer.client.cli.app import app

        app(prog_name="mini-infer")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
