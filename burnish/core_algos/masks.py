"""Which tokens are trained on."""

from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from burnish.utils.torch_functional import as_mask


def loss_mask_of(batch: TensorDict, like: Float[Tensor, "batch response"]) -> Bool[Tensor, "batch response"]:
    """l so far: ``loss_mask``, or where there is none ``response_mask``, without the rows that are not ``valid``.

    Args:
        batch: holds ``response_mask``, maybe ``loss_mask`` and ``valid`` (bool per row).
        like: a tensor of the shape that the masks must have.

    Returns:
        a new tensor: the response mask says what was sampled and must not change with this one.

    Raises:
        TrainingError: a mask of another shape, or with other values than 0 and 1; it names the batch key.
    """
    mask = as_mask(batch["response_mask"], like, "response_mask").clone()
    if "loss_mask" in batch:
        mask &= as_mask(batch["loss_mask"], mask, "loss_mask")
    if "valid" in batch:
        mask &= as_mask(batch["valid"], mask.any(dim=-1), "valid")[:, None]
    return mask
