"""The network that ``make faults`` disturbs."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.spark.faults.network import Network


@pytest.fixture
def network() -> Iterator[Network]:
    with Network("127.0.3.1", ports=1) as network:
        yield network


@pytest.fixture
def connection(network: Network) -> Iterator[socket.socket]:
    """To a server behind the network that sends back what it receives."""
    (port,) = network.ports
    with socket.create_server(("127.0.0.1", port)) as server:

        def echo() -> None:
            peer, _ = server.accept()
            with peer:
                while piece := peer.recv(100):
                    peer.sendall(piece)

        threading.Thread(target=echo, daemon=True).start()
        with socket.create_connection((network.host, port), timeout=10) as connection:
            yield connection


def test_what_is_sent_arrives_also_over_a_slow_network(network: Network, connection: socket.socket) -> None:
    network.delay_s = 0.01
    for number in range(3):
        connection.sendall(b"%d" % number)
        assert connection.recv(100) == b"%d" % number


def test_a_connection_that_is_cut_has_ended_for_both_sides(
    network: Network, connection: socket.socket
) -> None:
    connection.sendall(b"hello")
    assert connection.recv(100) == b"hello"
    assert network.cut() == 1
    assert connection.recv(100) == b""


def test_without_a_driver_a_connection_ends_at_once(network: Network) -> None:
    (port,) = network.ports
    with socket.create_connection((network.host, port), timeout=10) as connection:
        assert connection.recv(100) == b""
