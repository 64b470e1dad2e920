"""Tokens of a micro-batch, at most."""

from burnish.config.plan import BatchPlan, UpdatePlan
from burnish.utils.seqlen_balancing import sharing_pays


def micro_batch_tokens(
    update: UpdatePlan, plan: BatchPlan, share_prompts: bool | None, *, samples: int | None = None
) -> int:
    """Tokens of the largest micro-batch of one rank, when every prompt and response has its full length.

    Args:
        share_prompts: whether a prompt is computed once for its samples; None: where that saves enough.
        samples: of the rank; those of one update when None.
    """
    rows = update.samples_per_worker if samples is None else samples
    each, group = plan.prompt_tokens + plan.response_tokens, plan.samples_per_prompt
    apart = rows * each
    together = -(-rows // group) * plan.prompt_tokens + rows * plan.response_tokens
    shares = sharing_pays(apart, together) if share_prompts is None else share_prompts
    total = together if shares and group > 1 else apart
    size = update.sequence_parallel
    if update.micro_batch_samples is not None:
        return -(-min(total, update.micro_batch_samples * each) // size)
    assert update.micro_batch_tokens is not None
    return min(-(-total // size), update.micro_batch_tokens)
