"""A byte-level tokenizer with a chat template: 256 bytes and six special tokens, no merges.

Every text is spelt byte by byte, so any text round-trips and a number is its digits.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, END, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable stand-ins for the bytes 0..255, in that order (the byte-to-unicode table of GPT-2).

    Bytes that are printable in Latin-1 stand for themselves; the others are shifted, in order, to 256 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(shifted)}
    return [stand_in[byte] for byte in range(256)]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer: id = byte value for 0..255, then `SPECIAL_TOKENS`; pad and end of turn differ.

    Args:
        max_length: tokens a sequence may have at most (the model's number of positions).
    """
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_alphabet())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
