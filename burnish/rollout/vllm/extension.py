"""What burnish adds to each vLLM worker: its own sampler, weights taken version by version, and the proof that they arrived.

vLLM makes `WorkerExtension` a base of its worker class when it is named as ``worker_extension_cls``, so the methods here are
called through ``collective_rpc`` by name, on every rank of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.model.lora import is_adapter_name
from burnish.rollout.vllm import cpu_group, cpu_linear
from burnish.rollout.vllm.adapters import Adapters, without_adapters
from burnish.rollout.vllm.held import HeldWeights, gather_by
from burnish.rollout.vllm.launch import follow_starter
from burnish.rollout.vllm.receiver import WeightReceiver
from burnish.utils.errors import RolloutError

# vLLM imports this module in each worker before it makes its groups and the model, and these must come before that.
cpu_group.name_shared_memory_uniquely()
cpu_linear.keep_weights_readable()
follow_starter()


@dataclass
class _Update:
    """One update of the weights, while it goes on."""

    version: int
    seen: set[str] = field(default_factory=set)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0


class _State:
    """What the extension keeps of its worker's model."""

    def __init__(self, worker: Any) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        self.model: Any = worker.get_model()
        self.dtype: torch.dtype = worker.vllm_config.model_config.dtype
        gather = gather_by(group.device_group, group.world_size)
        self.held = HeldWeights(self.model, self.dtype, gather, group.rank_in_group, group.world_size)
        self.names = list(self.held.weights)
        """What the last update called the weights: of a tied pair one name or both."""
        self.has_base = False
        self.version = 0
        self.update: _Update | None = None
        self.adapters: Adapters | None = None


class WorkerExtension(WeightReceiver):
    """Methods of a vLLM worker; ``self`` is that worker, with ``model_runner``, ``device`` and ``vllm_config``.

    An update is ``begin_update``, ``take_weights`` any number of times, ``end_update``. The first one must
    bring every weight; later ones every weight, or of a policy with adapters these alone.
    """

    model_runner: Any
    vllm_config: Any

    def install_sampler(self) -> None:
        """Puts burnish's sampler in the place of vLLM's."""
        from burnish.rollout.vllm.sampler import install

        install(self.model_runner)

    def use_adapters(self, config: dict[str, Any]) -> None:
        """Says what the adapters of all updates are; the engine was started with ``enable_lora``.

        Args:
            config: as in peft's ``adapter_config.json``: ``r``, ``lora_alpha``, ``use_rslora`` ...
        """
        state = self._state()
        state.adapters = Adapters(self.model_runner, state.held, state.dtype, config)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every weight that the engine holds, by Hugging Face name: what an update must bring."""
        return {name: weight.shape for name, weight in self._state().held.weights.items()}

    def begin_update(self, version: int) -> None:
        """Begins to take the weights of policy ``version``; an update that was begun before is forgotten."""
        self._state().update = _Update(version)

    @torch.no_grad()
    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes some of them: Hugging Face names, full tensors on any device.

        Each is taken before the next is asked for; after that, and after the call, it may be overwritten.

        Raises:
            RolloutError: a name that the model does not have, another shape than it has here, a name sent twice, one that
                vLLM's loader left out.
        """
        from vllm.config import set_current_vllm_config

        state, taken = self._state(), []

        def base() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                # Of a tied pair one is loaded; whether the other is the same, the fingerprints tell.
                if self._take(name, tensor) and not state.held.is_alias(name):
                    # Until the end of the update the model is a mixture of two.
                    state.has_base = False
                    taken.append(name)
                    yield name, tensor

        # The engine's own loader knows what it joins and splits.
        with set_current_vllm_config(self.vllm_config), without_adapters(state.model):
            loaded: set[str] = state.model.load_weights(base())
        for name in taken:
            held = state.held.find(name)
            if held is not None and held.parameter not in loaded:
                raise RolloutError(
                    f"vLLM's loader of {type(state.model).__name__} left {name!r} out: it never arrived."
                )

    def _take(self, name: str, tensor: Tensor) -> bool:
        """Checks a weight of the stream, and keeps an adapter; whether it is one of the base."""
        state, update = self._state(), self._begun()
        if name in update.seen:
            raise RolloutError(f"The weight stream holds {name!r} twice.")
        update.seen.add(name)
        update.num_bytes += tensor.nbytes
        if not is_adapter_name(name):
            _check(state.held, name, tensor)
            return True
        if state.adapters is None:
            raise RolloutError(
                f"The weight stream brings the adapter {name!r}, but vLLM was started without adapters: the rollout would "
                f"sample from the base for ever."
            )
        state.adapters.check(name, tensor)
        # They go in together, when all have come, and the sender may overwrite its own before that.
        update.adapters[name] = tensor.detach().to(state.dtype, copy=True)
        return False

    def end_update(self) -> dict[str, int]:
        """Ends the update: nothing may be missing.

        Returns:
            ``version``, ``num_tensors`` and ``num_bytes``.

        Raises:
            RolloutError: a weight did not come; adapters that the engine does not have.
        """
        state, update = self._state(), self._begun()
        state.update = None
        base = [name for name in update.seen if not is_adapter_name(name)]
        came = {state.held.canonical(name) for name in base}
        missing = [name for name in state.held.weights if name not in came]
        if missing and (base or not state.has_base):
            raise RolloutError(
                f"The weight stream ended without {missing[0]!r} and {len(missing) - 1} other weights of vLLM's "
                f"{type(state.model).__name__}."
            )
        if base:
            if self.vllm_config.device_config.device_type == "cpu":
                cpu_linear.pack_again(state.model)
            state.has_base, state.names = True, sorted(base)
        if state.adapters is not None:
            state.adapters.replace(update.adapters)
        state.version = update.version
        return {"version": update.version, "num_tensors": len(update.seen), "num_bytes": update.num_bytes}

    @torch.no_grad()
    def fingerprints(self) -> dict[str, int]:
        """`burnish.utils.fingerprint` of every weight that this rank samples with, whole, by the names of the stream.

        Raises:
            RolloutError: a layer computes with other values than it holds.
        """
        state = self._state()
        found = state.held.fingerprints(state.names)
        if self.vllm_config.device_config.device_type == "cpu":
            stale = cpu_linear.stale_layer(state.model, state.version)
            if stale is not None:
                raise RolloutError(
                    f"vLLM computes with an old copy of '{stale}.weight': it would sample from no policy that was trained."
                )
        if state.adapters is not None:
            found |= state.adapters.fingerprints()
        return found

    def forget_model(self) -> None:
        """The engine ends: nothing of burnish's refers to its model any more."""
        self.__dict__.pop("burnish_state", None)
        self.close_buckets()
        self.leave_broadcast()

    def _state(self) -> _State:
        # A worker's constructor knows nothing of its extension.
        if "burnish_state" not in self.__dict__:
            self.__dict__["burnish_state"] = _State(self)
        state: _State = self.__dict__["burnish_state"]
        return state

    def _begun(self) -> _Update:
        update = self._state().update
        if update is None:
            raise RolloutError("Weights came without begin_update before them.")
        return update


def _check(held: HeldWeights, name: str, tensor: Tensor) -> None:
    weight = held.find(name)
    if weight is None:
        raise RolloutError(f"The weight stream holds {name!r}, which vLLM's model does not have.")
    if weight.shape != tuple(tensor.shape):
        raise RolloutError(f"The weight stream's {name!r} has shape {list(tensor.shape)}, vLLM's {list(weight.shape)}.")
