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
    _check_interfaces("GLOO_SOCKET_IFNAME", env.get("GLOO_SOCKET_IFNAME"), prefixes=False)
    if uses_nccl:
        _check_interfaces("NCCL_SOCKET_IFNAME", env.get("NCCL_SOCKET_IFNAME"), prefixes=True)
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


def _check_interfaces(variable: str, value: str | None, *, prefixes: bool) -> None:
    """One of the interfaces that ``variable`` names is here.

    Args:
        prefixes: whether a name stands for all that begin with it, as NCCL has it: ``=`` before it means the very name, ``^``
            before the list all but these.
    """
    if not value or (prefixes and value.startswith("^")):
        return
    exact = not prefixes or value.startswith("=")
    names = [name for name in value.removeprefix("=").split(",") if name]
    here = [name for _, name in socket.if_nameindex()]
    if not names or any(name == one or (not exact and one.startswith(name)) for name in names for one in here):
        return
    raise WorkerError(
        f"{variable}={value}: {socket.gethostname()} has no such network interface; it has {', '.join(here)}. Unset the variable "
        f"(burnish takes the interface that leads to rank 0), or give each node its own value before `ray start` there."
    )
