"""The chat template's self-test, and whether tokenizer, model and template agree on what ends a turn."""

from typing import Any

from burnish.config import PPOTrainerConfig
from burnish.model.load import eos_token_ids
from burnish.render import check_template
from burnish.render.template_check import turn_end_ids
from burnish.trainer.preflight.findings import Findings
from burnish.utils.errors import ModelError

_AREA = "template"


def check_tokenizer(config: PPOTrainerConfig, tokenizer: Any, findings: Findings) -> None:
    """Notes problems of the template as warnings: training runs with them, on worse text."""
    model = config.actor_rollout_ref.model
    name = model.tokenizer_path or model.path
    checked = check_template(tokenizer, config.data.apply_chat_template_kwargs)
    key = "actor_rollout_ref.model.custom_chat_template" if model.custom_chat_template else None
    for problem in checked.problems:
        findings.warning(_AREA, f"The chat template of {name}: {problem}", key)
    if not checked.has_template:
        findings.note(_AREA, f"{name} has no chat template: prompts must be plain text.")
        return
    for remark in checked.remarks:
        findings.note(_AREA, f"The chat template of {name}: {remark}", key)
    ends = turn_end_ids(tokenizer, config.data.apply_chat_template_kwargs)
    try:
        stops = set(eos_token_ids(str(model.path), tokenizer))
    except ModelError:
        return  # Whoever reads the model says what is wrong with it.
    stops |= set(config.actor_rollout_ref.rollout.stop_token_ids)
    if ends and not stops & set(ends):
        shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in ends)
        known = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in sorted(stops)) or "none"
        findings.warning(
            _AREA,
            f"The template of {name} ends an assistant's turn with {shown}, but generation stops at {known}: the model would "
            f"talk on after its answer. Set actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, ends))}].",
            "actor_rollout_ref.rollout.stop_token_ids",
        )
