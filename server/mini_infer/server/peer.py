"""Who calls: one name for each peer, whatever connection it comes by. Knows addresses, not identities."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote


def caller_of(peer: str) -> str:
    """The peer's host without its port, from gRPC's form, such as ``ipv4:10.0.0.7:53211`` or ``unix:/run/x``.

    A host that is reached over both IP versions is one caller: loopback is "localhost", and an IPv4 address mapped
    into IPv6 is the IPv4 address. Every unix socket's peer is "unix": the socket's own rights guard it.
    """
    scheme, _, rest = unquote(peer).partition(":")
    if scheme.startswith("unix"):
        return "unix"
    host = rest.rpartition(":")[0].strip("[]")
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(host)
    except ValueError:
        return host or peer
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return "localhost" if address.is_loopback else str(address)
