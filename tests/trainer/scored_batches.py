"""Scored batches made by hand."""

import torch

from burnish.protocol import DataProto, object_array


def scored(uids, scores, valid=None, **extras) -> DataProto:
    """One response of two tokens a row; an extra is a list with an entry a row."""
    token_level_scores = torch.zeros(len(uids), 2)
    token_level_scores[:, 1] = torch.tensor(scores)
    return DataProto.from_dict(
        tensors={
            "responses": torch.zeros(len(uids), 2, dtype=torch.int64),
            "response_mask": torch.ones(len(uids), 2, dtype=torch.bool),
            "token_level_scores": token_level_scores,
            "valid": torch.tensor([True] * len(uids) if valid is None else valid),
        },
        non_tensors={"uid": object_array(uids), **{name: object_array(values) for name, values in extras.items()}},
        meta_info={"reward_extra_keys": list(extras)},
    )
