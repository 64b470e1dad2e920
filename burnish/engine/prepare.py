"""What becomes of a Hugging Face model before it is laid out: its adapters, what is trained, and its fused layers."""

import torch

from burnish.config import CriticModelConfig, HFModelConfig
from burnish.model import lora
from burnish.model.fused_adapters import fuse_adapters
from burnish.model.fused_layers import fuse_where_it_pays
from burnish.model.policy import PolicyModule, ValueModule, set_dtype


def prepare_module(
    module: PolicyModule | ValueModule,
    config: HFModelConfig | CriticModelConfig,
    *,
    trained: bool,
    has_adapters: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Adds the adapters, says which parameters are trained, gives those their master dtype and the blocks fused forwards.

    Args:
        trained: whether anything of it is trained.
        dtype: in which it will compute.
        device: where.
    """
    if has_adapters:
        lora.add_adapters(module.model, config, base_path=config.path)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained and (not has_adapters or _is_trained_beside_base(name)))
    # Masters have at least float32; a model that is only read needs none, nor does one beside its adapters.
    set_dtype(module, torch.promote_types(dtype, torch.float32), trained=True)
    fuse_where_it_pays(module.model, device, dtype)
    if has_adapters:
        fuse_adapters(module.model)


def _is_trained_beside_base(name: str) -> bool:
    """Whether a parameter is trained where the base is frozen: an adapter's, or the value head's, which no base has."""
    return lora.is_adapter_name(name) or name.startswith("value_head.")
