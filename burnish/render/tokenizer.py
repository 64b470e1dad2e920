"""The tokenizer of a model folder."""

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from burnish.config import HFModelConfig
from burnish.utils import hub, local_paths, storage
from burnish.utils.errors import ModelError
from burnish.utils.foreign_code import Caught
from burnish.utils.model_folder import config_folder

logger = logging.getLogger(__name__)

# One of these is in every folder that holds a tokenizer of any kind.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt", "*.tiktoken", "tekken.json", "*.bpe")


def load_tokenizer(
    path: str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at ``path`` (a folder, ``~`` expanded, a URL, or a Hugging Face id), with a pad token.

    A tokenizer without pad token gets its end-of-sequence token (else unknown, else begin) as one: padding needs an id,
    and no mask is ever derived from it.

    Args:
        chat_template: replaces the model's own template; Jinja text, or the path or URL of a file that holds it.

    Raises:
        ModelError: there is no tokenizer, it cannot be loaded, or it has no token that could pad.
        StorageError: what a URL names cannot be fetched.
    """
    path = config_folder(storage.localize(path))
    folder = local_paths.expanded(path)
    if local_paths.is_dir(folder):
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:20]) or "nothing"
            raise ModelError(
                f"The model folder {folder} has no tokenizer (no tokenizer.json, tokenizer_config.json, vocab.json or "
                f"*.model; it holds: {present}). Save one there with tokenizer.save_pretrained({str(folder)!r}), or "
                f"name another folder as actor_rollout_ref.model.tokenizer_path."
            )
        path = str(folder)
    elif path.startswith(("/", "~", ".")):
        raise ModelError(f"There is no model folder {folder}.")
    hub.check_model(path, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        nowhere = "" if local_paths.exists(folder) else f" There is no folder {path} in {Path.cwd()} either."
        raise ModelError(f"The tokenizer of {path} cannot be loaded: {str(error).rstrip()}{nowhere}") from error
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
        _check_syntax(tokenizer, chat_template)
    set_pad_token(tokenizer)
    return tokenizer


def tokenizer_of(model: HFModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that a run trains, as its section of the configuration says.

    Raises:
        ModelError, StorageError: as `load_tokenizer`.
    """
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.custom_chat_template,
    )


def _check_syntax(tokenizer: PreTrainedTokenizerBase, named: str) -> None:
    """That the template which the user gave can be read; what it makes of a conversation is looked at elsewhere."""
    from jinja2 import TemplateSyntaxError

    # It may refuse this conversation for a reason of its own.
    with Caught() as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    error = caught.error
    if isinstance(error, TemplateSyntaxError):
        what = f"{named[:60]!r}" if "{" in named else f"the file {named}"
        raise ModelError(
            f"The chat template of your own ({what}; actor_rollout_ref.model.custom_chat_template, or --chat-template) is no "
            f"valid Jinja: {error.message} in line {error.lineno}."
        ) from error


def read_chat_template(chat_template: str) -> str:
    """Jinja text as it is, or the text of the file that ``chat_template`` names.

    Raises:
        ModelError: it is neither.
    """
    if "{" in chat_template:
        return chat_template
    file = local_paths.expanded(storage.localize(chat_template))
    if not local_paths.is_file(file):
        raise ModelError(
            f"The chat template {chat_template!r} (actor_rollout_ref.model.custom_chat_template) is neither Jinja text "
            f"nor a file that exists."
        )
    return file.read_text(encoding="utf-8")


def set_pad_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer that has no pad token one of its other special tokens for it.

    Raises:
        ModelError: it has no special token at all.
    """
    if tokenizer.pad_token_id is not None:
        return
    for token in (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token):
        if token is not None:
            tokenizer.pad_token = token
            return
    raise ModelError(
        f"The tokenizer {tokenizer.name_or_path!r} has no pad, end-of-sequence, unknown or begin token, so batches "
        f"cannot be padded. Set tokenizer.pad_token and save it again."
    )
