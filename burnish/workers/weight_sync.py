"""From the trained weights to the rollout's copy of them, with proof that they arrived."""

from __future__ import annotations

import logging
import time

import torch

from burnish.config import RolloutConfig
from burnish.engine import FSDPEngine, ranks
from burnish.model.lora import hf_name, is_adapter_name
from burnish.rollout.base import BaseRollout, WeightStream
from burnish.rollout.build import rollout_dtype
from burnish.rollout.stats import RolloutStats
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints, combined

logger = logging.getLogger("burnish.workers")


class WeightSync:
    """Hands the weights of an engine to a rollout, version by version.

    A rollout that shares the engine's storage is only checked to do so. For one that keeps a copy the fingerprint of every
    tensor is taken as it is sent, and compared with what the rollout holds afterwards. Of a policy with adapters the frozen
    base is sent once, and again whenever the rollout says that it needs it.
    """

    def __init__(self, engine: FSDPEngine, rollout: BaseRollout, config: RolloutConfig) -> None:
        self._engine, self._rollout = engine, rollout
        self._dtype = rollout_dtype(engine, config)
        self._bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self._sent: dict[str, int] = {}
        self.checksum: str | None = None
        """Of the weights that the rollout samples from; None where it reads the trained ones."""

    def push(self, version: int) -> RolloutStats:
        """Hands over the weights as policy ``version``; all ranks call it.

        Returns:
            What the copy took; nothing where there is none.

        Raises:
            RolloutError: the rollout does not hold what was sent to it.
        """
        if self._rollout.shares_storage:
            self._rollout.update_weights(self._engine.named_weights(), version)
            return RolloutStats()
        stats, sent, start = RolloutStats(), Fingerprints(), time.perf_counter()
        sends_base = not self._engine.has_adapters or self._needs_base()
        names: list[str] = []

        def counted() -> WeightStream:
            stream = self._engine.named_weights(bucket_bytes=self._bucket_bytes, adapters_only=not sends_base)
            for name, tensor in stream:
                names.append(name)
                stats.weight_copy_bytes += tensor.nbytes
                sent.add(name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor)
                yield name, tensor
            names.append("")  # The stream was read to its end.

        self._rollout.update_weights(counted(), version)
        self._check_taken(names)
        self._synchronise()
        stats.weight_copy_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self._sent = ({} if sends_base else self._sent) | sent.read()
        self.checksum = combined(self._sent)
        self._check_arrived(version)
        stats.weight_check_seconds = time.perf_counter() - start
        logger.debug("The rollout has the weights of policy %d, checksum %s.", version, self.checksum)
        return stats

    def _needs_base(self) -> bool:
        # The ranks gather together, so all send the base when one must; an engine that does not say gets it every time.
        needs = not self._sent or getattr(self._rollout, "needs_base", True)
        (any_rank_needs,) = ranks.all_reduce_numbers([float(needs)], "max", self._engine.device)
        return any_rank_needs > 0

    def _check_taken(self, names: list[str]) -> None:
        if not names or names[-1]:
            raise RolloutError(
                f"{_name(self._rollout)}.update_weights stopped after {len(names)} tensors of the weight stream: it must read "
                f"all of it."
            )
        if self._engine.has_adapters and not any(is_adapter_name(name) for name in names):
            raise RolloutError(
                "The policy trains adapters, but the weight stream held none: the rollout would never learn."
            )

    def _check_arrived(self, version: int) -> None:
        if not hasattr(self._rollout, "weights_checksum"):
            return
        held = self._rollout.weights_checksum()
        if held is None:
            # Another rank answers for the engine that they share.
            return
        # Buffers may be kept in another dtype, or computed anew; every parameter must be there.
        parameters = self._parameter_names()
        for name, ours in self._sent.items():
            if name not in held and is_adapter_name(name):
                raise RolloutError(
                    f"{_name(self._rollout)} was sent the adapter {name!r} of policy {version} and holds none of that name: it "
                    f"would sample from the base for ever."
                )
            if name not in held and name in parameters:
                raise RolloutError(
                    f"{_name(self._rollout)} was sent {name!r} of policy {version} and holds nothing of that name: whatever it "
                    f"samples from is not proven to be the policy."
                )
            if name in held and held[name] != ours:
                raise RolloutError(
                    f"{_name(self._rollout)} was sent policy {version}, but its {name!r} holds other values than were sent: it "
                    f"would sample from no policy that was trained."
                )
        unsent = sorted(set(held) - set(self._sent))
        if unsent:
            raise RolloutError(
                f"{_name(self._rollout)} holds {unsent[0]!r}, which policy {version} does not have and nobody sent."
            )

    def _parameter_names(self) -> set[str]:
        return {hf_name(name) for name, _ in self._engine.module.model.named_parameters()}

    def _synchronise(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)


def _name(rollout: BaseRollout) -> str:
    return type(rollout).__name__
