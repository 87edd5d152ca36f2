"""Where the server listens: one address from host and port, looked at before gRPC binds it. Binds nothing for good.

gRPC says of a port that it cannot have only that it cannot, and takes the path of a living unix socket away.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""What the kernel has room for."""

_log = logging.getLogger(__name__)
_ANY_V6 = ("::", "[::]")
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


class CannotListen(Exception):
    """The address cannot be listened on; the message is one line."""


def listen_address(host: str, port: int) -> str:
    """An address for gRPC. Raises `CannotListen` where it is taken or not of this machine.

    ``host`` is a name, an IP address or ``unix:PATH``. "::" is IPv4's "0.0.0.0" on a machine without IPv6.
    """
    if host.startswith("unix:"):
        _require_free_socket(Path(host.removeprefix("unix:").removeprefix("//")))
        return host
    host = host.removeprefix("[").removesuffix("]")
    try:
        _require_free_port(host, port)
    except OSError as error:
        if host not in _ANY_V6 or error.errno not in _NO_IPV6:
            raise CannotListen(f"cannot listen on {_join(host, port)}: {_reason(error)}") from error
        _log.warning("this machine has no IPv6: listening on 0.0.0.0 in place of [::]")
        return listen_address("0.0.0.0", port)  # noqa: S104  # all interfaces were asked for
    return _join(host, port)


def bound_address(address: str, port: int) -> str:
    """The address with the port that was given out for port 0."""
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


def _require_free_port(host: str, port: int) -> None:
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise CannotListen(f"cannot listen on {_join(host, port)}: not the name of a host") from error
    for family, kind, protocol, _, place in places:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: not TIME_WAIT, but listeners
            probe.bind(place)


def _require_free_socket(path: Path) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise CannotListen(f"cannot listen on unix:{path}: its path is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise CannotListen(f"cannot listen on unix:{path}: no folder {path.parent}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise CannotListen(f"cannot listen on unix:{path}: there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left behind by a process that is gone
        except OSError as error:
            raise CannotListen(f"cannot listen on unix:{path}: {_reason(error)}") from error
    raise CannotListen(f"cannot listen on unix:{path}: {os.strerror(errno.EADDRINUSE)}")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
