"""Facts about this machine."""

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
