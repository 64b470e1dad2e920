"""Whether the reward function returns the numbers that the configuration names, asked before anything heavy starts."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from burnish.config import AlgoConfig
from burnish.protocol import DataProto
from burnish.reward import RewardManager
from burnish.rollout import RolloutResponse, requests_from_dataproto, responses_to_dataproto
from burnish.trainer.ppo.prompts import repeat_prompts
from burnish.trainer.ppo.scoring import SCORE_NAMES, as_numbers, describe_numbers, find_extra, score_batch
from burnish.utils.errors import ConfigError
from burnish.utils.foreign_code import Caught

logger = logging.getLogger("burnish.trainer")


def check_reward_numbers(
    config: AlgoConfig, reward_fn: RewardManager, dataset: Any, collate_fn: Callable[..., dict[str, Any]], eos: int
) -> None:
    """Lets ``reward_fn`` score an empty response, if the configuration names a number that it is to return.

    A reward function that fails on that, or gives no score, is asked again by the first batch, which names the same.

    Args:
        config: the ``algorithm`` section.
        dataset, collate_fn: of training; its first row is the prompt.
        eos: the token that ends a response at once.

    Raises:
        ConfigError: a number that it does not return, by the key that names it.
    """
    wanted = list(_named_numbers(config))
    if not wanted:
        return
    batch = empty_response(collate_fn([dataset[0]]), eos)
    with Caught() as caught:
        batch, _ = score_batch(reward_fn, batch)
    if caught.error is not None or not batch.tensors["valid"].all():
        logger.info("The reward function gives an empty response no score; the first batch checks what it returns.")
        return
    for key, name in wanted:
        values = find_extra(batch, name)
        # None says that this response has no such number, and others may.
        if values is None or (values[0] is not None and as_numbers(values) is None):
            raise ConfigError(
                f"{key}: the reward function returns no number {name} (it was asked to score an empty response to the "
                f"first prompt). {describe_numbers(batch)} Name one of these, or let it return {name} with every score."
            )


def _named_numbers(config: AlgoConfig) -> Iterator[tuple[str, str]]:
    """The keys, as set, and the numbers that they name, but for the score itself, which there always is."""
    metric = config.filter_groups.metric
    if config.filter_groups.enable and metric and metric not in (*SCORE_NAMES, "reward"):
        yield f"algorithm.filter_groups.metric={metric}", metric
    if config.adv_estimator == "gdpo":
        for name in config.gdpo_reward_keys or ():
            if name not in SCORE_NAMES:
                yield f"algorithm.gdpo_reward_keys=[{','.join(config.gdpo_reward_keys or ())}]", name


def empty_response(batch_dict: dict[str, Any], eos: int) -> DataProto:
    """A response of nothing but its end to every prompt, with all that a reward manager gets to see."""
    batch = repeat_prompts(batch_dict, n=1, uid_prefix="probe", pad_token_id=eos)
    prompts = batch.pop(["input_ids", "attention_mask", "position_ids"])
    prompts.non_tensor_batch = {key: batch.non_tensor_batch[key] for key in ("uid", "sample_index")}
    responses = [
        RolloutResponse(request.request_id, [eos], [0.0], finish_reason="stop", policy_version=0)
        for request in requests_from_dataproto(prompts)
    ]
    return batch.union(responses_to_dataproto(prompts, responses, pad_token_id=eos))
