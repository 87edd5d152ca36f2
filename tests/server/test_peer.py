"""One name for each caller, whatever connection it comes by."""

import pytest

from mini_infer.server.peer import caller_of


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:127.0.0.1:53211", "localhost"),
        ("ipv4:127.8.9.10:1", "localhost"),
        ("ipv6:%5B::1%5D:53211", "localhost"),
        ("ipv6:[::1]:53211", "localhost"),
        ("ipv6:%5B::ffff:127.0.0.1%5D:1", "localhost"),
        ("ipv4:10.0.0.7:53211", "10.0.0.7"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:53211", "10.0.0.7"),
        ("ipv6:%5B2001:db8::1%5D:443", "2001:db8::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:443", "fe80::1%eth0"),
        ("unix:", "unix"),
        ("unix:/run/mini-infer", "unix"),
        ("unix-abstract:name", "unix"),
        ("", ""),
        ("something", "something"),
    ],
)
def test_peers(peer: str, caller: str) -> None:
    assert caller_of(peer) == caller
