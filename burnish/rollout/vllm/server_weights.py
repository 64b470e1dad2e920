"""How trained weights reach servers: by files in a folder that both sides see, and by their developer endpoints.

The servers run vLLM with ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls burnish.rollout.vllm.served.ServedExtension``,
which takes the files into the model and tells the fingerprints of what the model then holds.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from burnish.config.rollout import ServerConfig
from burnish.rollout.base import WeightStream
from burnish.rollout.vllm.http_client import Interrupted, Refused
from burnish.rollout.vllm.server_facts import ServerFacts
from burnish.utils import local_paths
from burnish.utils.errors import BurnishError, ConfigError, RolloutError

_KEY = "actor_rollout_ref.rollout.server"
_RPC = "/collective_rpc"
_FILE_BYTES = 1 << 30
_HANDED_OVER = re.compile(r"policy-\d+-[a-z0-9_]{8}")
"""Names of the folders that weights are in while servers take them."""
_SECONDS_OF_A_FILE = 600.0
"""That writing one file takes at most; then the servers have the time that they are given."""


class Handover:
    """Hands weights to servers; of several ranks the first does, and the others wait for it.

    Args:
        servers: each gets all of them.
        dtype: in which floating-point weights are written.

    Raises:
        ConfigError: ``server.weights_dir`` is no folder that can be written to.
        RolloutError: a server without the endpoints or the extension.
    """

    def __init__(self, servers: Sequence[ServerFacts], config: ServerConfig, dtype: torch.dtype) -> None:
        assert config.weights_dir is not None, "made only where weights are handed over"
        self._servers, self._config, self._dtype = servers, config, dtype
        self._folder = local_paths.expanded(config.weights_dir).absolute()
        self._on_first_rank(self._check)

    def send(self, stream: WeightStream, version: int) -> None:
        """Brings all weights of policy ``version`` to all servers, and reads the stream to its end.

        Raises:
            RolloutError: a server that did not take them, on every rank.
        """
        if _rank() != 0:
            for _ in stream:  # The ranks gather the weights together.
                pass
        self._on_first_rank(lambda: self._send(stream, version))

    def checksum(self) -> dict[str, int] | None:
        """Fingerprints of what the servers hold, by the names of the stream; None on every rank but the first.

        Raises:
            RolloutError: two servers, or two ranks of one, hold different weights.
        """
        if _rank() != 0:
            return None
        first: dict[str, int] | None = None
        for server in self._servers:
            for held in self._call(server, "served_fingerprints"):
                found = {name: int(value) for name, value in held.items()}
                first = found if first is None else first
                differing = next((name for name in first if found.get(name) != first[name]), None)
                if differing is not None:
                    raise RolloutError(
                        f"{server.client.url} holds other values of {differing!r} than {self._servers[0].client.url}: "
                        f"responses would be sampled from different policies."
                    )
        return first

    def _check(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = Path(tempfile.mkdtemp(dir=self._folder, prefix="probe-"))
        except OSError as error:
            raise ConfigError(f"{_KEY}.weights_dir={self._folder}: {error.strerror}.") from error
        try:
            for server in self._servers:
                dtypes = {str(told["dtype"]) for told in self._call(server, "served", str(probe))}
                if dtypes != {str(self._dtype)}:
                    raise RolloutError(
                        f"{server.client.url} computes in {', '.join(sorted(dtypes))}, but the weights that it is handed are "
                        f"{self._dtype}. Start it with --dtype {str(self._dtype).removeprefix('torch.')}, or set "
                        f"actor_rollout_ref.rollout.dtype."
                    )
        finally:
            shutil.rmtree(probe)

    def _send(self, stream: WeightStream, version: int) -> None:
        self._remove_left_overs()
        folder = Path(tempfile.mkdtemp(dir=self._folder, prefix=f"policy-{version}-"))
        # Servers may run as somebody else.
        folder.chmod(0o755)
        try:
            names = self._write(stream, folder)
            with ThreadPoolExecutor(len(self._servers)) as threads:
                list(threads.map(lambda server: self._take(server, folder, names, version), self._servers))
        except OSError as error:
            raise RolloutError(f"{_KEY}.weights_dir={self._folder}: {error.strerror or error}.") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _remove_left_overs(self) -> None:
        """What runs have left that were killed while they handed weights over: a whole model each, which may fill the memory that
        the folder is in. Another run may hand over just now."""
        latest = time.time() - self._config.timeout - _SECONDS_OF_A_FILE
        for folder in self._folder.iterdir():
            with suppress(OSError):
                if _HANDED_OVER.fullmatch(folder.name) and folder.stat().st_mtime < latest:
                    shutil.rmtree(folder, ignore_errors=True)

    def _take(self, server: ServerFacts, folder: Path, names: Sequence[str], version: int) -> None:
        # Responses that others sample meanwhile stand still, and go on with the new weights.
        self._post(server, "/pause?mode=keep", None)
        try:
            self._call(server, "take_files", str(folder), list(names), version)
            # Keys and values of the old weights; those of the responses that stand still are computed anew.
            answer = self._post(server, "/reset_prefix_cache?reset_running_requests=true", None)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise RolloutError(
                    f"{server.client.url} could not forget the keys and values that it had computed with the old weights; "
                    f"start it with --no-enable-prefix-caching, or let nobody else use it."
                )
        finally:
            self._post(server, "/resume", None)

    def _write(self, stream: WeightStream, folder: Path) -> list[str]:
        """Files of about a gibibyte; their names, in order."""
        names: list[str] = []
        part: dict[str, Tensor] = {}

        def flush() -> None:
            if part:
                names.append(f"{len(names):05d}.safetensors")
                save_file(part, folder / names[-1])
                (folder / names[-1]).chmod(0o644)
                part.clear()

        size = 0
        for name, tensor in stream:
            if name in part:
                raise RolloutError(f"The weight stream holds {name!r} twice.")
            # A copy: the sender may overwrite its own, and tied weights may not share memory in a file.
            kind = self._dtype if tensor.is_floating_point() else tensor.dtype
            part[name] = tensor.detach().to("cpu", kind, copy=True).contiguous()
            size += part[name].nbytes
            if size >= _FILE_BYTES:
                flush()
                size = 0
        flush()
        return names

    def _call(self, server: ServerFacts, method: str, *args: Any) -> list[Any]:
        """What a method of the extension returns on every rank of a server."""
        answer = self._post(server, _RPC, {"method": method, "args": list(args), "timeout": self._config.timeout})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RolloutError(f"{server.client.url}{_RPC} answered {str(answer)[:200]} to {method}.")
        for result in results:
            if isinstance(result, dict) and "burnish_error" in result:
                raise RolloutError(f"{server.client.url}: {result['burnish_error']}")
        return results

    def _post(self, server: ServerFacts, path: str, body: dict[str, Any] | None) -> Any:
        try:
            return server.client.post(path, body, self._config.timeout)
        except Refused as error:
            missing = error.status in (404, 405)
            how = (
                "It has no developer endpoints: start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
                "burnish.rollout.vllm.served.ServedExtension (docs/vllm.md)."
                if missing
                else ""
            )
            raise RolloutError(f"{server.client.url} cannot be given weights. {how or error}") from error
        except Interrupted as error:
            hint = (
                " Was it started with --worker-extension-cls burnish.rollout.vllm.served.ServedExtension?"
                if path == _RPC
                else ""
            )
            raise RolloutError(f"{server.client.url} cannot be given weights. {error}{hint}") from error

    def _on_first_rank(self, act: Callable[[], None]) -> None:
        """Has the first rank do it, and every rank raise what goes wrong there."""
        failure: list[Any] = [None]
        error: BurnishError | None = None
        if _rank() == 0:
            try:
                act()
            except BurnishError as raised:
                error, failure = raised, [str(raised)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(failure, src=0)
        if error is not None:
            raise error
        if failure[0] is not None:
            raise RolloutError(failure[0])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
