"""Tokenizer, model and template must agree on what ends an answer."""

import json

from burnish.config import load_config
from burnish.trainer.preflight import Findings, check_tokenizer
from tests.render.fake_tokenizers import byte_tokenizer


def findings_of(tmp_path, tokenizer, *overrides, eos=None):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": eos, "bos_token_id": None}
        )
    )
    config = load_config(
        ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=none.jsonl",
         "actor_rollout_ref.rollout.n=2", *overrides]
    )  # fmt: skip
    findings = Findings()
    check_tokenizer(config, tokenizer, findings)
    return [finding.message for finding in findings.of("warning")]


def test_a_turn_that_ends_with_another_token_than_generation_stops_at_is_told(tmp_path):
    tokenizer = byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert findings_of(tmp_path, tokenizer) == [], "the tokenizer's own end is the template's"
    tokenizer.eos_token = "<pad>"
    (warning,) = findings_of(tmp_path, tokenizer)
    assert f"stop_token_ids=[{end}]" in warning
    assert findings_of(tmp_path, tokenizer, eos=end) == [], "the model's configuration names it"
    assert findings_of(tmp_path, tokenizer, f"actor_rollout_ref.rollout.stop_token_ids=[{end}]") == []
