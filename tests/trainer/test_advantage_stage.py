import math

import pytest
import torch

from burnish.config import AlgoConfig, PPOTrainerConfig, RolloutCorrectionConfig
from burnish.core_algos.kl import AdaptiveKLController
from burnish.protocol import DataProto
from burnish.trainer.ppo.advantage_stage import advantages_of, check_batch_is_finite
from burnish.trainer.ppo.updates import kept_on_error
from burnish.utils.errors import BatchError, TrainingError
from tests.trainer.scored_batches import scored


def with_values(*values, key="old_log_probs", **kwargs):
    batch = scored("ab", [1.0, 0.0], **kwargs)
    batch.tensors[key] = torch.tensor(values)
    return batch


@pytest.mark.parametrize("key", ["rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "token_level_scores"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_number_that_is_none_is_named_by_its_key_and_place(key, poison):
    with pytest.raises(TrainingError, match=f"{key} holds NaN or inf in 1 .*row 1, token 0"):
        check_batch_is_finite(with_values([0.0, 0.0], [poison, 0.0], key=key))


def test_what_takes_part_in_nothing_may_be_anything():
    poisoned = [math.nan, math.nan]
    check_batch_is_finite(with_values([0.0, 0.0], poisoned, valid=[True, False]))
    check_batch_is_finite(with_values([0.0, 0.0], poisoned, valid=[True, False], key="token_level_scores"))
    batch = with_values([0.0, math.nan], [0.0, math.inf])
    batch.tensors["response_mask"] = torch.tensor([[True, False], [True, False]])
    check_batch_is_finite(batch)


def test_rejected_rows_neither_steer_the_kl_coefficient_nor_are_in_a_baseline():
    batch = scored("aaa", [1.0, 0.0, 8.0])
    # KL to the reference: 0.5 a token in the first two rows, 40 in the last, which the rollout is far from too.
    batch.tensors["old_log_probs"] = torch.full((3, 2), -1.0)
    batch.tensors["ref_log_prob"] = torch.tensor([[-1.5], [-1.5], [-41.0]]).expand(3, 2).clone()
    batch.tensors["rollout_log_probs"] = torch.tensor([[-1.0], [-1.0], [-9.0]]).expand(3, 2).clone()
    correction = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    algorithm = AlgoConfig(adv_estimator="rloo", use_kl_in_reward=True, rollout_correction=correction)
    controller = AdaptiveKLController(0.1, target_kl=1.0, horizon=10)
    batch, metrics = advantages_of(batch, PPOTrainerConfig(algorithm=algorithm), controller)
    assert batch.tensors["loss_mask"].any(-1).tolist() == [True, True, False]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    # -0.2 (clipped) for two rows of ten.
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))
    assert batch.tensors["advantages"][:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0])


def test_a_training_error_leaves_the_batch_behind_and_says_where(tmp_path):
    batch = scored("ab", [1.0, 0.0])
    with (
        pytest.raises(TrainingError, match=r"Step 7: it went wrong\. The batch is in .*step_7") as caught,
        kept_on_error(batch, tmp_path, 7),
    ):
        raise TrainingError("it went wrong.")
    assert isinstance(caught.value.__cause__, TrainingError)
    (file,) = tmp_path.iterdir()
    assert torch.equal(
        DataProto.load_from_disk(str(file)).tensors["token_level_scores"], batch.tensors["token_level_scores"]
    )


def test_a_disk_that_takes_nothing_does_not_hide_what_went_wrong(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    with (
        pytest.raises(TrainingError, match=r"Step 7: it went wrong\. The batch could not be written"),
        kept_on_error(scored("a", [1.0]), taken, 7),
    ):
        raise TrainingError("it went wrong.")


def test_other_errors_go_through_as_they_are(tmp_path):
    with pytest.raises(BatchError, match="^as it is$"), kept_on_error(scored("a", [1.0]), tmp_path, 7):
        raise BatchError("as it is")
    assert not list(tmp_path.iterdir())
