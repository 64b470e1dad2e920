"""The responses of a run on the disk: ``<step>.jsonl`` to read, ``<step>.tokens.parquet`` to look closely and to replay.

Both have one row a response, in the same order. Of the texts nothing is left out: every sample with its uid, score and whatever
the reward function returned. The token file has what happened to each token:

========================  ==================  ======================================================================
column                    type                meaning
========================  ==================  ======================================================================
uid, sample_index         string, int32       which prompt of which epoch, and which of its samples
prompt_ids                list<int32>         the prompt's tokens
response_ids              list<int32>         the response's tokens, also those that the policy did not sample
rollout_log_probs         list<float32>       by the engine that sampled them
old_log_probs             list<float32>?      by the policy before the update; null where the step did not compute them
advantages                list<float32>?      null where the row was not trained on
token_level_scores        list<float32>       the reward function's
loss_mask                 list<bool>?         true where the token was trained on; null where the row was not trained on
response_mask             list<bool>          true where the policy sampled the token
values                    list<float32>?      the critic's; null without one
truncated_log_probs       list<float32>?      in the distribution that was drawn from, where it was cut short (top_p, ...)
reward_baseline           float?              score of the greedy response to the prompt (ReMax)
valid, trained            bool                whether it has a score; whether it was trained on (dynamic sampling)
policy_version, last_policy_version, num_preemptions   int64   as in the batch
========================  ==================  ======================================================================

Reading needs no torch.
"""

from burnish.trainer.rollout_store.layout import (
    FIELDS,
    SAMPLES_FOLDER,
    extra_field,
    set_aside,
    steps,
    texts_path,
    tokens_path,
)
from burnish.trainer.rollout_store.reading import read_notes, read_texts, read_tokens
from burnish.trainer.rollout_store.writing import rows_to_sample, text_rows, write_step, write_texts

__all__ = [
    "FIELDS",
    "SAMPLES_FOLDER",
    "extra_field",
    "read_notes",
    "read_texts",
    "read_tokens",
    "rows_to_sample",
    "set_aside",
    "steps",
    "text_rows",
    "texts_path",
    "tokens_path",
    "write_step",
    "write_texts",
]
