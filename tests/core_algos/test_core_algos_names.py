"""The names that users write are the names that exist."""

from burnish.config import names
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.estimators import ADV_ESTIMATORS, AdvantageEstimator
from burnish.core_algos.kl import KL_PENALTIES
from burnish.core_algos.policy_losses import POLICY_LOSSES
from burnish.trainer.ppo import core_algos


def test_the_configuration_lists_what_is_registered():
    assert sorted(names.ADV_ESTIMATORS) == sorted(ADV_ESTIMATORS) == sorted(AdvantageEstimator)
    assert sorted(names.POLICY_LOSSES) == sorted(POLICY_LOSSES)
    assert names.LOSS_AGG_MODES == LOSS_AGG_MODES
    assert names.KL_PENALTIES == KL_PENALTIES


def test_the_facade_exports_what_it_names():
    assert all(hasattr(core_algos, name) for name in core_algos.__all__)
    assert core_algos.get_adv_estimator_fn("grpo") is core_algos.compute_grpo_outcome_advantage
    assert core_algos.get_adv_estimator_fn(AdvantageEstimator.GAE) is core_algos.compute_gae_advantage_return


def test_the_facade_has_the_function_of_every_estimator_and_loss():
    functions = {id(value) for value in vars(core_algos).values()}
    assert [name for name in ADV_ESTIMATORS if id(ADV_ESTIMATORS.get(name)) not in functions] == []
    assert [name for name in POLICY_LOSSES if id(POLICY_LOSSES.get(name)) not in functions] == []
