"""Facts about this machine."""

import os
import socket
import sys

import pytest

from burnish.utils import env


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the answer is None")
def test_the_interface_towards_an_address_is_one_of_this_machines() -> None:
    assert env.interface_towards("127.0.0.1") == "lo"
    assert env.interface_towards("no address") is None
    names = [name for _, name in socket.if_nameindex()]
    assert env.interface_towards("192.0.2.77") in [None, *names]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the answer is None")
def test_the_memory_that_is_available_is_part_of_the_machines() -> None:
    available = env.available_memory()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_waiting_threads_are_calmed_unless_the_user_chose(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert env.calm_threads() == {"GOMP_SPINCOUNT": env.get("GOMP_SPINCOUNT")} != {"GOMP_SPINCOUNT": None}
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert env.calm_threads() == {"GOMP_SPINCOUNT": "7"}
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert env.calm_threads() == {}
    assert env.get("GOMP_SPINCOUNT") is None
