"""Processes that cannot reach each other say so at once, and which variable or port is to blame."""

import socket

import pytest

from burnish.single_controller import WorkerContext, network
from burnish.single_controller.network import check_network
from burnish.utils.errors import WorkerError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def a_port_where_nobody_listens() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_rank_that_cannot_reach_the_first_one_names_itself_the_place_and_the_cause():
    port = a_port_where_nobody_listens()
    here = WorkerContext(1, 2, 1, 2, "127.0.0.1", port)
    with pytest.raises(WorkerError, match=rf"rank 1 on \S+ cannot reach rank 0 at 127.0.0.1:{port}: .*refused") as told:
        check_network(here, uses_nccl=False)
    assert "each machine's own" not in str(told.value)
    elsewhere = WorkerContext(1, 2, 0, 1, "127.0.0.1", port)
    with pytest.raises(WorkerError, match=r"Addresses 127\.\* are each machine's own.*--node-ip-address"):
        check_network(elsewhere, uses_nccl=False)


def test_a_port_that_answers_nothing_is_a_firewalls(monkeypatch):
    def silent(place, timeout):
        assert place == ("10.9.8.7", 5)
        raise TimeoutError("timed out")

    monkeypatch.setattr(network.socket, "create_connection", silent)
    with pytest.raises(WorkerError, match="as behind a firewall"):
        check_network(WorkerContext(3, 4, 1, 2, "10.9.8.7", 5), uses_nccl=True)


def test_a_port_that_answers_is_enough():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_network(WorkerContext(1, 2, 0, 1, "127.0.0.1", server.getsockname()[1]), uses_nccl=True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "nowhere7"),
        ("GLOO_SOCKET_IFNAME", "l"),
        ("GLOO_SOCKET_IFNAME", "lo,nowhere7"),
        ("NCCL_SOCKET_IFNAME", "nowhere7"),
        ("NCCL_SOCKET_IFNAME", "=l"),
    ],
)
def test_an_interface_that_is_not_here_is_named_with_those_that_are(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.raises(WorkerError, match=rf"{variable}={value}: \S+ has no such network interface; it has lo, eth0\."):
        check_network(WorkerContext(), uses_nccl=True)


@pytest.mark.parametrize("value", ["lo", "l", "^eth", "nowhere7,lo", "=lo", ""])
def test_what_nccl_takes_is_not_refused(monkeypatch, value):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    check_network(WorkerContext(), uses_nccl=True)


def test_without_nccl_its_variable_means_nothing(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere7")
    check_network(WorkerContext(), uses_nccl=False)
