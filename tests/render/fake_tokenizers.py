"""Small real tokenizers for tests: one token a byte, with or without a chat template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = CHATML, *, begin: bool = False, end: bool = False
) -> PreTrainedTokenizerFast:
    """One token a byte, and the special tokens of CHATML; ``begin`` and ``end``: every text gets them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>", "<pad>"])
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=("<s> " if begin else "") + "$A" + (" <|im_end|>" if end else ""),
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "<|im_end|>")],
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    wrapped.chat_template = chat_template
    return wrapped
