"""Responses on the disk: all of them, with all that is known, as they were, and readable a few at a time."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto, object_array
from burnish.trainer import rollout_store
from burnish.utils.errors import DataError


class Letters:
    """A tokenizer whose tokens are letters."""

    pad_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(96 + token) if token < 90 else "\ud83d" for token in ids)

    def get_vocab(self):
        return {chr(96 + token): token for token in range(1, 27)}


def batch_of(responses, uids=None, prompts=None, extras=None, **tensors):
    """Scored responses, given as lists of tokens; padding everywhere."""
    num_rows, width, prompt_width = len(responses), max(map(len, responses)) + 2, 4
    uids = uids or [f"epoch0-{row // 2}" for row in range(num_rows)]
    prompts = prompts or [[1, 2, 3]] * num_rows
    made = {
        "prompts": torch.zeros(num_rows, prompt_width, dtype=torch.int64),
        "responses": torch.zeros(num_rows, width, dtype=torch.int64),
        "attention_mask": torch.zeros(num_rows, prompt_width + width, dtype=torch.bool),
    }
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        made["prompts"][row, prompt_width - len(prompt) :] = torch.tensor(prompt)
        made["responses"][row, : len(response)] = torch.tensor(response)
        made["attention_mask"][row, prompt_width - len(prompt) : prompt_width + len(response)] = True
    mask = made["attention_mask"][:, prompt_width:].clone()
    numbers = torch.arange(num_rows * width, dtype=torch.float32).reshape(num_rows, width) / 7
    made |= {"response_mask": mask, "rollout_log_probs": -numbers, "token_level_scores": numbers * mask}
    made |= {"valid": torch.ones(num_rows, dtype=torch.bool), **tensors}
    extras = extras or {}
    counts: dict = {}
    indices = [counts.setdefault(uid, iter(range(99))).__next__() for uid in uids]
    others = {"uid": uids, "sample_index": indices, "finish_reason": ["stop"] * num_rows, **extras}
    return DataProto.from_dict(
        tensors=made,
        non_tensors={name: object_array(list(values)) for name, values in others.items()},
        meta_info={"reward_extra_keys": list(extras)},
    )


def test_every_sample_has_its_uid_step_prompt_response_score_and_all_extras(tmp_path):
    # A tool's tokens stand between two turns of the policy: the mask leaves them out, the response does not.
    responses = [[1, 2, 30, 3], [4], [5, 6], [7]]
    batch = batch_of(responses, extras={"acc": [True, False, None, np.float32(0.5)], "prompt": [1, 2, 3, 4]})
    batch.tensors["response_mask"][0, 2] = False
    rollout_store.write_step(tmp_path, 7, batch, Letters())
    rows = rollout_store.read_texts(tmp_path, 7)
    assert [(row["step"], row["uid"], row["sample_index"]) for row in rows] == [
        (7, "epoch0-0", 0),
        (7, "epoch0-0", 1),
        (7, "epoch0-1", 0),
        (7, "epoch0-1", 1),
    ]
    assert [row["response"] for row in rows] == ["ab~c", "d", "ef", "g"]
    assert [row["num_tokens"] for row in rows] == [4, 1, 2, 1]
    assert {row["prompt"] for row in rows} == {"abc"}
    assert [row["score"] for row in rows] == pytest.approx(batch.tensors["token_level_scores"].sum(-1).tolist())
    assert [row["acc"] for row in rows] == [True, False, None, 0.5]
    # A field of every line keeps its meaning.
    assert [row["reward_extra/prompt"] for row in rows] == [1, 2, 3, 4]
    assert all(set(rollout_store.FIELDS) <= set(row) for row in rows)


def test_tokens_come_back_to_the_last_bit_in_any_order(tmp_path):
    generator = torch.Generator().manual_seed(0)
    responses = [torch.randint(1, 27, (1 + row % 9,), generator=generator).tolist() for row in range(200)]
    extra = {"old_log_probs": torch.randn(200, 11, generator=generator), "loss_mask": torch.rand(200, 11) > 0.5}
    batch = batch_of(responses, **extra, policy_version=torch.arange(200))
    rollout_store.write_step(tmp_path, 1, batch, Letters(), notes={"complete": True})
    whole = rollout_store.read_tokens(tmp_path, 1)
    asked = [199, 0, 64, 63, 65, 0]
    for row, stored in [*enumerate(whole), *zip(asked, rollout_store.read_tokens(tmp_path, 1, asked), strict=True)]:
        length = len(responses[row])
        assert stored["response_ids"].tolist() == responses[row]
        assert stored["prompt_ids"].tolist() == [1, 2, 3]
        for column, key in {
            "rollout_log_probs": "rollout_log_probs",
            "old_log_probs": "old_log_probs",
            "loss_mask": "loss_mask",
        }.items():
            assert np.array_equal(stored[column], batch.tensors[key][row, :length].numpy())
        assert stored["values"] is None
        assert stored["policy_version"] == row
    assert rollout_store.read_notes(tmp_path, 1) == {"step": 1, "extras": [], "complete": True}


def test_what_was_not_trained_on_is_there_and_says_so(tmp_path):
    trained = batch_of([[1], [2]], advantages=torch.ones(2, 3), loss_mask=torch.ones(2, 3, dtype=torch.bool))
    left_out = batch_of([[3], [4]], uids=["epoch0-round1-8"] * 2, extras={"acc": [1, 1]})
    rollout_store.write_step(tmp_path, 1, trained, Letters(), untrained=[left_out])
    texts, tokens = rollout_store.read_texts(tmp_path, 1), rollout_store.read_tokens(tmp_path, 1)
    assert [row["trained"] for row in texts] == [row["trained"] for row in tokens] == [True, True, False, False]
    assert [row["response"] for row in texts] == ["a", "b", "c", "d"]
    assert [row["advantages"] is None for row in tokens] == [False, False, True, True]
    assert texts[2]["acc"] == 1


def test_text_is_utf8_and_a_lone_surrogate_survives(tmp_path):
    rollout_store.write_step(tmp_path, 1, batch_of([[1, 95], [2]], extras={"note": ["中文", "b"]}), Letters())
    raw = (tmp_path / "1.jsonl").read_bytes()
    assert "中文".encode() in raw
    raw.decode("utf-8")
    assert rollout_store.read_texts(tmp_path, 1)[0]["response"] == "a\ud83d"


def test_a_step_is_there_as_a_whole_or_not_at_all(tmp_path):
    class Failing(Letters):
        def decode(self, ids, skip_special_tokens):
            if ids == [2]:
                raise OSError("no space left")
            return super().decode(ids, skip_special_tokens)

    batch = batch_of([[1], [2]])
    rollout_store.write_step(tmp_path, 1, batch, Letters())
    before = (tmp_path / "1.jsonl").read_bytes()
    for step in (1, 2):
        with pytest.raises(OSError, match="no space left"):
            rollout_store.write_step(tmp_path, step, batch, Failing())
    assert rollout_store.steps(tmp_path) == [1]
    assert (tmp_path / "1.jsonl").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_what_a_resumed_run_writes_again_is_set_aside(tmp_path):
    for step in (1, 2, 3):
        rollout_store.write_step(tmp_path, step, batch_of([[step]]), Letters())
    (tmp_path / "mine.txt").write_text("")
    assert rollout_store.set_aside(tmp_path, 3) is None
    moved = rollout_store.set_aside(tmp_path, 1)
    assert rollout_store.steps(tmp_path) == [1]
    assert rollout_store.steps(moved) == [2, 3]
    assert rollout_store.read_tokens(moved, 3)[0]["response_ids"].tolist() == [3]
    # A run from the start leaves nothing of another one.
    assert rollout_store.set_aside(tmp_path, 0) != moved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "set_aside.1", "set_aside.2"]


def test_samples_are_whole_groups_and_the_same_prompts_in_every_epoch():
    uids = [f"epoch0-{row}" for row in range(16) for _ in range(4)]
    rows = rollout_store.rows_to_sample(uids, 8)
    assert len(rows) == 8
    chosen = {uids[row] for row in rows}
    assert len(chosen) == 2
    shuffled = [f"epoch3-{row}" for row in reversed(range(16)) for _ in range(4)]
    again = {shuffled[row] for row in rollout_store.rows_to_sample(shuffled, 8)}
    assert {uid.removeprefix("epoch3-") for uid in again} == {uid.removeprefix("epoch0-") for uid in chosen}
    # Where not even one group fits, it is the first samples of the same prompt.
    assert {uids[row].removeprefix("epoch0-") for row in rollout_store.rows_to_sample(uids, 3)} == {
        shuffled[row].removeprefix("epoch3-") for row in rollout_store.rows_to_sample(shuffled, 3)
    }
    assert rollout_store.rows_to_sample(uids, 0) == []
    # A group that does not fit is begun; a batch that fits is taken whole.
    assert rollout_store.rows_to_sample(["epoch0-1"] * 16, 8) == list(range(8))
    assert sorted(rollout_store.rows_to_sample(uids, 100)) == list(range(64))
    assert rollout_store.rows_to_sample([], 8) == []


def test_a_damaged_file_is_named_and_a_missing_one_is_empty(tmp_path):
    assert rollout_store.read_tokens(tmp_path, 1) == []
    assert rollout_store.read_texts(tmp_path, 1) == []
    assert rollout_store.steps(tmp_path / "nowhere") == []
    rollout_store.write_step(tmp_path, 1, batch_of([[1]]), Letters())
    with pytest.raises(DataError, match=r"1\.tokens\.parquet cannot be read.*1 rows, and number 5"):
        rollout_store.read_tokens(tmp_path, 1, [5])
    (tmp_path / "1.tokens.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"1\.tokens\.parquet cannot be read"):
        rollout_store.read_tokens(tmp_path, 1)


def test_reading_needs_no_torch():
    code = "import sys, burnish.trainer.rollout_store; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout.lower()) is False
