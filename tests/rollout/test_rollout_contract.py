"""Both engines hold the contract, and are found by their names."""

import pytest

from burnish.rollout.base import get_rollout_cls, register_rollout
from burnish.rollout.hf import HFRollout
from burnish.rollout.native.engine import NativeRollout
from burnish.utils.errors import ConfigError
from tests.rollout.sampling_contract import SamplingContract


class TestNativeRollout(SamplingContract):
    engine_cls = NativeRollout


class TestHFRollout(SamplingContract):
    engine_cls = HFRollout


def test_engines_are_found_by_name() -> None:
    assert get_rollout_cls("native") is NativeRollout
    assert get_rollout_cls("hf") is HFRollout
    with pytest.raises(ConfigError, match=r"Did you mean 'native'\? Known: hf, native"):
        get_rollout_cls("nativ")


def test_an_engine_of_ones_own_is_registered_or_named_by_its_path() -> None:
    target = "burnish.rollout.hf:HFRollout"
    assert get_rollout_cls(target) is HFRollout
    assert register_rollout("native")(NativeRollout) is NativeRollout
