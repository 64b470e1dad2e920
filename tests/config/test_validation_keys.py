"""What is said of keys of validation where nothing is validated, in both trees."""

import pytest

from burnish.config.idle_sections import idle_sentences
from burnish.config.load import load_sft_with_notices, load_with_notices
from burnish.config.validation_checks import check_validation_data, idle_without_validation_data
from burnish.utils.errors import ConfigError

FILES = ["data.train_files=a.jsonl", "data.val_files=b.jsonl"]
VAL_KWARGS = "actor_rollout_ref.rollout.val_kwargs"


def load(*overrides):
    return load_with_notices([*FILES, *overrides])


def load_sft(*overrides):
    return load_sft_with_notices([*FILES, *overrides])


def test_files_that_are_never_validated_are_told():
    (notice,) = load("trainer.val_before_train=false", "data.val_batch_size=8").notices
    assert notice.startswith("No effect here: data.val_files=b.jsonl, data.val_batch_size=8. The reason: ")
    assert "trainer.val_before_train=false and trainer.test_freq=-1 (the default) never validate" in notice
    (notice,) = load_sft("trainer.val_before_train=false")[1]
    assert "data.val_files=b.jsonl" in notice


@pytest.mark.parametrize("when", [[], ["trainer.val_before_train=false", "trainer.test_freq=2"]])
def test_files_that_are_validated_are_not(when):
    assert load(*when, "data.val_batch_size=8").notices == ()
    assert load_sft(*when, "data.val_batch_size=8")[1] == ()


def test_validating_alone_is_validating_before_the_first_step():
    (notice,) = load("trainer.val_only=true", "trainer.val_before_train=false").notices
    assert "trainer.val_before_train=false. The reason: trainer.val_only=true" in notice


def test_without_data_keys_that_ask_for_a_validation_are_told():
    keys = ["trainer.test_freq=5", "data.val_batch_size=8", f"{VAL_KWARGS}.n=1", "data.val_files=null"]
    config = load(*keys).config
    (told,) = idle_sentences(config, idle_without_validation_data(config))
    assert told == (
        "No effect here: trainer.test_freq=5, data.val_batch_size=8. The reason: there is nothing to validate on "
        "(data.val_files=null)."
    )
    assert list(idle_without_validation_data(load_sft(*keys[:1])[0])) == ["trainer.test_freq"]


def test_without_data_keys_that_ask_for_none_are_not_told():
    none = ["trainer.test_freq=0", "trainer.val_before_train=false", "data.val_files=null"]
    assert idle_without_validation_data(load(*none).config) == {}


@pytest.mark.parametrize(
    "keys",
    [
        ["trainer.val_only=true"],
        ["trainer.keep_best=val-core/a/acc/mean@1", "trainer.save_freq=1", "trainer.test_freq=1"],
    ],
)
def test_a_run_that_needs_validation_data_is_refused_without_any(keys):
    with pytest.raises(ConfigError, match=rf"{keys[0].split('=')[0]}=.*nothing to validate on. Set data\.val_files"):
        check_validation_data(load(*keys).config)
