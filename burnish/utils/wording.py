"""Sentences for people."""

import re

# As long as a path may sensibly be; what is longer is no name of anything.
_LONGEST_WORD = 1000
_KEPT = 60


def without_endless_words(text: str) -> str:
    """``text`` with words of more than a thousand characters cut in their middle, so that the sentence around them is found."""

    def cut(found: re.Match[str]) -> str:
        word = found[0]
        return f"{word[:_KEPT]}...({len(word):,} characters)...{word[-_KEPT:]}"

    return re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", cut, text)
