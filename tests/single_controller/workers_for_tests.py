"""Workers that the tests run in other processes; those import them from here."""

import os
import signal
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from burnish.protocol import DataProto
from burnish.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from burnish.utils import env, progress


def numbers(num_rows: int) -> DataProto:
    """Rows 0, 1, ... with a mask that is true everywhere and a name a row."""
    return DataProto.from_dict(
        tensors={
            "x": torch.arange(num_rows, dtype=torch.float32),
            "response_mask": torch.ones(num_rows, 2, dtype=torch.bool),
            "loss_mask": torch.ones(num_rows, 2, dtype=torch.bool),
        },
        non_tensors={"uid": [f"row {row}" for row in range(num_rows)]},
        meta_info={"step": 3},
    )


def add(x: torch.Tensor, amount: float) -> torch.Tensor:
    """A function for DP_COMPUTE_PROTO_WITH_FUNC."""
    return x + amount


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> None:
    """Asserts that the processes end in time."""
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class EveryMode(Worker):
    """One method for each dispatch mode."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def only_first(self, word: str) -> str:
        """A docstring that the group's method keeps."""
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def one_to_all_on_first(self, word: str) -> str:
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, word: str, times: int = 1) -> str:
        return word * times

    @register()
    def all_to_all(self, a: int, b: int = 0) -> int:
        return a + b

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, values: list[int]) -> int:
        return sum(values)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def proto(self, data: DataProto, factor: float = 1.0) -> DataProto:
        result = DataProto.from_dict(
            tensors={"y": data.batch["x"] * factor + self.offset},
            non_tensors={"uid": list(data.non_tensor_batch["uid"])},
            meta_info={"metrics": {"mean": float(data.batch["x"].mean())}},
        )
        # What a worker does to its batch must not show on the driver.
        data.pop(batch_keys=["x"])
        data.meta_info["step"] = -1
        return result

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def two_protos(self, data: DataProto, *, other: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"y": data.batch["x"] + other.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice(self, data: DataProto) -> DataProto:
        return data.repeat(2, interleave=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def first_row(self, data: DataProto) -> DataProto:
        return data.slice(0, 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def no_proto(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def with_function(self, function, data: DataProto, amount: float) -> DataProto:
        return DataProto.from_dict(tensors={"y": function(data.batch["x"], amount)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> dict[str, list]:
        return {
            "x": data.batch["x"].tolist(),
            "trained_on": data.batch["loss_mask"].all(-1).tolist(),
            "sampled": data.batch["response_mask"].all(-1).tolist(),
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def proto_later(self, data: DataProto, seconds: float = 0.0) -> DataProto:
        time.sleep(seconds)
        return DataProto.from_dict(tensors={"x": data.batch["x"] + 100})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def unmaterialized(self, data) -> DataProto:
        assert not isinstance(data, DataProto)
        return data.get()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def one_to_all_later(self, word: str) -> str:
        return f"{word} {self.rank}"

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def only_first_later(self, word: str) -> str:
        return word

    @register(
        dispatch_mode={"dispatch_fn": lambda wg, x: (([x] * wg.world_size,), {}), "collect_fn": lambda wg, o: sum(o)}
    )
    def own_functions(self, x: int) -> int:
        return x


class Mesh(Worker):
    """Ranks on a mesh of data in reversed order, and on one whose ranks all have the same rows."""

    def __init__(self) -> None:
        last = self.world_size - 1
        self._register_dispatch_collect_info("reversed", last - self.rank, is_collect=True)
        self._register_dispatch_collect_info("replicated", 0, is_collect=self.rank == last)
        self._register_dispatch_collect_info("broken", 0, is_collect=True)

    def _doubled(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            tensors={"y": data.batch["x"] * 2, "rank": torch.full((len(data),), self.rank)},
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reversed"))
    def reversed(self, data: DataProto) -> DataProto:
        return self._doubled(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("replicated"))
    def replicated(self, data: DataProto) -> DataProto:
        return self._doubled(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reversed"), blocking=False)
    def reversed_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 2})

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn("replicated"))
    def sums_on_replicated(self, data: DataProto) -> tuple[int, float]:
        return self.rank, float(data.batch["x"].sum())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("broken"))
    def on_broken_mesh(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("unknown"))
    def on_unknown_mesh(self, data: DataProto) -> DataProto:
        return data


class Place(Worker):
    """Tells where it runs, and meets its peers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {
            "env": {name: os.environ[name] for name in names},
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "master_port": self.master_port,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id() if ray.is_initialized() else "",
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seconds_to_wait(self) -> float:
        """The time limit of the default process group, which is made with what the controller said."""
        self.ensure_process_group("cpu")
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sum_of_ranks(self, wait: float = 0.0) -> float | None:
        time.sleep(wait)
        self.ensure_process_group("cpu", timeout_s=None if self.context.collective_timeout else 60)
        self.ensure_process_group("cpu")
        if not dist.is_initialized():
            return None
        total = torch.tensor(float(self.rank + 1))
        dist.all_reduce(total)
        return total.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gloo_interface(self) -> tuple[str | None, str | None]:
        """The interface that gloo was told to use, and that of this node's address."""
        return env.get("GLOO_SOCKET_IFNAME"), env.interface_towards(ray.util.get_node_ip_address())


class OtherPlace(Place):
    """A second role, so that two classes share a process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def only_of_critic(self) -> None:
        pass


class OwnError(Exception):
    """An error that does not survive a plain round trip through pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Fragile(Worker):
    """Fails on one rank while the other waits for it."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("the weights are upside down")
        time.sleep(600)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_own_error(self) -> None:
        raise OwnError("this", "that")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        self.ensure_process_group("cpu")
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_on(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, data: DataProto) -> DataProto:
        raise ValueError("too late")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def hang_later(self) -> None:
        time.sleep(600)


class FailsInConstructor(Worker):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no such model")


class Working(Worker):
    """Works long, or does nothing for long."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            progress.tick()
            time.sleep(0.05)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def work_on(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            self.work(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def idle_on(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stubborn(self, times: int) -> None:
        """Takes every error for one of the code that it calls, so many times."""
        for _ in range(times):
            try:
                time.sleep(600)
            except Exception:  # noqa: BLE001
                continue
        time.sleep(600)
