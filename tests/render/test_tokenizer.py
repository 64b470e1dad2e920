import json

import pytest

from burnish.render import check_template, load_tokenizer, set_pad_token
from burnish.utils.errors import ModelError
from tests.render.fake_tokenizers import CHATML, byte_tokenizer


@pytest.fixture
def saved(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_tokenizer_loads_with_its_template(saved):
    tokenizer = load_tokenizer(str(saved))
    assert tokenizer.chat_template == CHATML
    assert tokenizer("1+1=")["input_ids"] == byte_tokenizer()("1+1=")["input_ids"]


def test_the_template_can_be_replaced_by_text_or_by_a_file(saved, tmp_path):
    assert load_tokenizer(str(saved), chat_template="{{ messages }}").chat_template == "{{ messages }}"
    file = tmp_path / "own.jinja"
    file.write_text("{{ 1 }}")
    assert load_tokenizer(str(saved), chat_template=str(file)).chat_template == "{{ 1 }}"
    with pytest.raises(ModelError, match="neither Jinja text nor a file"):
        load_tokenizer(str(saved), chat_template="missing.jinja")
    with pytest.raises(ModelError, match=r"custom_chat_template.*is no valid Jinja: unexpected '\}' in line 2"):
        load_tokenizer(str(saved), chat_template="\n{{ messages }")


def test_a_folder_without_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"has no tokenizer .*it holds: config.json"):
        load_tokenizer(str(tmp_path))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="no model folder .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_broken_tokenizer_is_a_model_error(saved):
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(saved))


def test_a_tokenizer_without_pad_token_gets_its_end_token():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    set_pad_token(tokenizer)
    assert tokenizer.pad_token == "<|im_end|>"


def test_a_tokenizer_without_any_special_token_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.bos_token = None
    with pytest.raises(ModelError, match="cannot be padded"):
        set_pad_token(tokenizer)


def test_a_template_that_behaves_has_no_problems():
    assert check_template(byte_tokenizer()).ok


def test_no_template_is_no_problem():
    check = check_template(byte_tokenizer(None))
    assert check.ok
    assert not check.has_template


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "add_generation_prompt changes nothing"),
        ("{% for m in messages %}<|im_end|>{% endfor %}{% if add_generation_prompt %}A{% endif %}", "user's message"),
        (CHATML.replace("<|im_end|>\n", "\n"), "never sees where an answer ends"),
        ("<s><s>" + CHATML, "two begin tokens"),
        (CHATML + "{% if add_generation_prompt %}<think>{% endif %}", "not the beginning of the same conversation"),
        ("{{ raise_exception('no') }}", "cannot render"),
    ],
)
def test_what_would_hurt_training_is_said(template, problem):
    assert any(problem in found for found in check_template(byte_tokenizer(template)).problems)
