"""Where a server listens: taken ports, machines without IPv6, unix sockets."""

import errno
import logging
import socket
from pathlib import Path

import pytest

from mini_infer.server import address
from mini_infer.server.address import CannotListen, bound_address, listen_address


def test_a_free_port_is_taken_as_it_is() -> None:
    assert listen_address("127.0.0.1", 0) == "127.0.0.1:0"
    assert listen_address("localhost", 0) == "localhost:0"


def test_a_taken_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: Address already in use"):
            listen_address("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "a..b", 70 * "a"])
def test_an_address_of_somebody_else_says_so(host: str) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {host}:0: "):
        listen_address(host, 0)


@pytest.mark.parametrize("host", ["::", "[::]"])
@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_all_of_ipv6_is_all_of_ipv4_where_there_is_no_ipv6(
    host: str, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def probe(host: str, port: int) -> None:
        if ":" in host:
            raise OSError(error, "no IPv6")

    monkeypatch.setattr(address, "_require_free_port", probe)
    with caplog.at_level(logging.WARNING):
        assert listen_address(host, 50051) == "0.0.0.0:50051"
    assert "no IPv6" in caplog.text
    with pytest.raises(CannotListen):
        listen_address("::1", 50051)


def test_all_of_ipv6_with_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_require_free_port", lambda host, port: None)
    assert listen_address("::", 50051) == listen_address("[::]", 50051) == "[::]:50051"


def test_bound_addresses_carry_the_real_port() -> None:
    assert bound_address("127.0.0.1:0", 1234) == "127.0.0.1:1234"
    assert bound_address("[::1]:0", 1234) == "[::1]:1234"
    assert bound_address("unix:/tmp/x", 1) == "unix:/tmp/x"


def test_unix_sockets(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert listen_address(f"unix:{path}", 50051) == f"unix:{path}"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(CannotListen, match="already in use"):
            listen_address(f"unix://{path}", 0)
    assert listen_address(f"unix:{path}", 0), "a socket that was left behind is no hindrance"
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CannotListen, match="no socket"):
        listen_address(f"unix:{tmp_path}/file", 0)
    with pytest.raises(CannotListen, match="no folder"):
        listen_address(f"unix:{tmp_path}/none/s", 0)
    with pytest.raises(CannotListen, match="long"):
        listen_address(f"unix:{tmp_path}/{'x' * 200}", 0)
