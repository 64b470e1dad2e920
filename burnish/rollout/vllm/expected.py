"""What a stream of weights must bring: the parameters of the Hugging Face model, whichever engine takes them."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from burnish.model.load import build_causal_lm
from burnish.model.lora import is_adapter_name
from burnish.rollout.base import WeightStream
from burnish.utils.errors import RolloutError


class Expected:
    """Names and shapes of a model's weights.

    Args:
        config: of the model.
        has_adapters: the policy trains adapters, which come after their base.
    """

    def __init__(self, config: PreTrainedConfig, *, has_adapters: bool = False) -> None:
        with torch.device("meta"):
            model = build_causal_lm(copy.deepcopy(config), attn=False)
        self._name = type(model).__name__
        self._has_adapters = has_adapters
        self._shapes: Mapping[str, torch.Size] = {
            name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()
        }
        # Of a tied group the first name stands for all.
        parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        tied = model.state_dict(keep_vars=True)
        self._needed_by = {name: parameters[id(tensor)] for name, tensor in tied.items() if id(tensor) in parameters}
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr, index, assignment]
        """Rows of the embedding."""

    def check(self, stream: WeightStream, *, has_base: bool) -> WeightStream:
        """Passes the stream on, and raises where it is not that of the model.

        Args:
            has_base: the engine has the frozen base of the adapters, so they alone will do.

        Raises:
            RolloutError: an unknown, repeated, missing or mis-shaped name (the first one), or adapters before their base.
        """
        missing = dict.fromkeys(self._needed_by.values()) if not (has_base and self._has_adapters) else {}
        seen: set[str] = set()
        num_adapters = 0
        for name, tensor in stream:
            if name in seen:
                raise RolloutError(f"The weight stream holds {name!r} twice.")
            seen.add(name)
            if self._has_adapters and is_adapter_name(name):
                if missing:
                    raise RolloutError(
                        f"The weight stream brings the adapter {name!r} before {next(iter(missing))!r} of its base, which "
                        f"this rollout does not have yet: send the base first."
                    )
                num_adapters += 1
            else:
                self._check_known(name, tensor)
                missing.pop(self._needed_by.get(name, ""), None)
            yield name, tensor
        if missing:
            raise RolloutError(
                f"The weight stream ended without {next(iter(missing))!r} and {len(missing) - 1} other weights of the "
                f"rollout's {self._name}."
            )
        if self._has_adapters and not num_adapters:
            raise RolloutError(
                "The policy trains adapters, but the weight stream held none: the rollout would never learn."
            )

    def _check_known(self, name: str, tensor: Tensor) -> None:
        shape = self._shapes.get(name)
        if shape is None:
            raise RolloutError(f"The weight stream holds {name!r}, which the rollout's {self._name} does not have.")
        if shape != tensor.shape:
            raise RolloutError(
                f"The weight stream's {name!r} has shape {list(tensor.shape)}, the rollout's {list(shape)}."
            )
