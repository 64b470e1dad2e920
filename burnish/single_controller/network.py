"""Whether the processes of a group can reach each other, asked before they wait minutes for it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from burnish.utils import env
from burnish.utils.errors import WorkerError

if TYPE_CHECKING:
    from burnish.single_controller.worker import WorkerContext

_SECONDS_TO_CONNECT = 10.0


def check_network(context: WorkerContext, *, uses_nccl: bool) -> None:
    """What the environment says of network interfaces is true here, and rank 0 can be reached.

    Raises:
        WorkerError: names this machine, the variable or the address, and what to do.
    """
    _check_interfaces("GLOO_SOCKET_IFNAME", env.get("GLOO_SOCKET_IFNAME"), of_nccl=False)
    if uses_nccl:
        _check_interfaces("NCCL_SOCKET_IFNAME", env.get("NCCL_SOCKET_IFNAME"), of_nccl=True)
    if context.rank == 0 or context.master_port == 0:
        return
    place = f"{context.master_addr}:{context.master_port}"
    try:
        with socket.create_connection((context.master_addr, context.master_port), timeout=_SECONDS_TO_CONNECT):
            pass
    except OSError as error:
        why = "nothing answers, as behind a firewall" if isinstance(error, TimeoutError) else str(error)
        # Ranks are counted node by node.
        elsewhere = context.local_rank != context.rank
        own = " Addresses 127.* are each machine's own." if elsewhere and context.master_addr.startswith("127.") else ""
        raise WorkerError(
            f"The worker of rank {context.rank} on {socket.gethostname()} cannot reach rank 0 at {place}: {why}.{own} Workers "
            f"talk to each other on ports that the system chooses: open all ports between the nodes, and start Ray with the "
            f"address by which the others reach the node (`ray start --node-ip-address=...`)."
        ) from error


def _check_interfaces(variable: str, value: str | None, *, of_nccl: bool) -> None:
    """The interfaces that ``variable`` names are here.

    Args:
        of_nccl: whether one of them is enough, and a name stands for all that begin with it: ``=`` before the list means the
            very names, ``^`` all but these. Gloo opens each of its list.
    """
    if not value or (of_nccl and value.startswith("^")):
        return
    exact = not of_nccl or value.startswith("=")
    names = [name for name in value.removeprefix("=").split(",") if name]
    here = [name for _, name in socket.if_nameindex()]
    found = [any(name == one or (not exact and one.startswith(name)) for one in here) for name in names]
    if not names or (any(found) if of_nccl else all(found)):
        return
    raise WorkerError(
        f"{variable}={value}: {socket.gethostname()} has no such network interface; it has {', '.join(here)}. Unset it where the "
        f"run is started, whose variables the workers get: burnish takes the interface that leads to rank 0. A node that needs a "
        f"value of its own gets it before `ray start` there."
    )
