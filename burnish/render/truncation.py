"""What happens to a prompt that is too long (``data.truncation``)."""

from burnish.utils.errors import ConfigError, DataError

TRUNCATION_POLICIES = ("error", "left", "right", "middle", "drop")


def truncate(ids: list[int], max_length: int, policy: str) -> list[int] | None:
    """``ids`` in at most ``max_length`` tokens; None where the row is to be dropped.

    left keeps the end, right keeps the beginning, middle keeps both ends (the odd token at the end), drop gives None.

    Raises:
        DataError: too long, and the policy is error.
        ConfigError: an unknown policy.
    """
    if policy not in TRUNCATION_POLICIES:
        raise ConfigError(f"data.truncation={policy}: must be one of {', '.join(TRUNCATION_POLICIES)}.")
    if len(ids) <= max_length:
        return ids
    if policy == "error":
        raise DataError(
            f"The prompt has {len(ids)} tokens, more than data.max_prompt_length={max_length}. Raise the limit, leave "
            f"such rows out (data.filter_overlong_prompts=true), or set data.truncation to left, right, middle or drop."
        )
    if policy == "left":
        return ids[-max_length:]
    if policy == "right":
        return ids[:max_length]
    if policy == "middle":
        head = max_length // 2
        return ids[:head] + ids[head - max_length :]
    return None
