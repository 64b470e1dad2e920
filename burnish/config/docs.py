"""Generates docs/config.md from the dataclasses and the rules: ``python -m burnish.config.docs > docs/config.md``."""

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from burnish.config import rules
from burnish.config.schema import Leaf, walk
from burnish.config.section import Section
from burnish.config.trees import RL, SFT, Tree
from burnish.config.values import show

_HEAD = """\
# Configuration

This page is generated from the dataclasses in `burnish/config` by `python -m burnish.config.docs`.

Keys are set on the command line in Hydra's grammar, or in YAML files of the same tree:

```
burnish train algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_files=[a.parquet,b.parquet]
burnish train recipe=dapo                            # a recipe: burnish/config/recipes/dapo.yaml
burnish train algorithm=grpo                         # a group: burnish/config/groups/algorithm/grpo.yaml
burnish train --config-path conf --config-name mine  # conf/mine.yaml
burnish train --cfg job ...                          # prints the composed configuration
```

Later settings win: the recipe, then your file, then groups, then single keys, of a key that is there twice the last. Two
recipes, two files and two choices of one group are refused: they do not add up. `key=value`, `+key=value` and
`++key=value` mean the same; `~key` goes back to the default. `${data.train_batch_size}` refers to another key,
`${oc.env:HOME}` to the environment. Null is `null` or `None`. A path may begin with `~` or `~name`, the home of you or of
that user; where there is none, it is refused. Every key that exists is on this page, and any other is refused.

Units: `train_batch_size` and `ppo_mini_batch_size` count prompts, `*_micro_batch_size_per_gpu` samples (responses) of
one worker, `*_max_token_len_per_gpu` tokens of one worker.
"""


_SFT_HEAD = """
# Supervised fine-tuning: `burnish sft`

A tree of its own ([sft.md](sft.md)), set in the same ways. `train_batch_size` counts conversations over all workers,
`micro_batch_size_per_gpu` those of one worker.
"""


def generate() -> str:
    """The whole page."""
    parts = [_HEAD, *_of_tree(RL, ""), _SFT_HEAD, *_of_tree(SFT, " of `burnish sft`")]
    return "\n".join(parts)


def _of_tree(tree: Tree, whose: str) -> Iterator[str]:
    """Everything about one tree of keys; ``whose`` is what its headings end with."""
    yield from _recipes(tree, whose)
    for name, section in walk(tree.root()):
        own = [leaf for path, leaf in tree.leaves.items() if path.rpartition(".")[0] == name]
        if own:
            yield f"## {name or 'The root'}{whose}\n\n{_first_line(type(section))}\n"
            yield "| key | default | meaning |\n|---|---|---|\n" + "".join(_row(leaf, section, tree) for leaf in own)
    yield from (*_renamed(tree, whose), *_no_effect(tree, whose), *_refused(tree, whose))


def _recipes(tree: Tree, whose: str) -> Iterator[str]:
    yield f"## Recipes{whose}\n\n`recipe=NAME` or `--config-name NAME`; a recipe holds what differs from the defaults.\n"
    files = sorted(tree.recipes.glob("*.yaml"))
    yield "| recipe | what it is |\n|---|---|\n" + "".join(f"| `{file.stem}` | {_comment(file)} |\n" for file in files)


def _comment(file: Path) -> str:
    """The comment at the top of a YAML file, on one line."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("# ") for line in comments if "@package" not in line)


def _first_line(cls: type[Section]) -> str:
    return inspect.cleandoc(cls.__doc__ or "").splitlines()[0]


def _row(leaf: Leaf, section: Section, tree: Tree) -> str:
    name = leaf.path.rpartition(".")[2]
    meaning = field_docs(type(section))[name]
    reason = rules.lookup(leaf.path, tree.rules.no_effect)
    refusal = rules.lookup(leaf.path, tree.rules.refused)
    if leaf.choices:
        meaning += f" One of: {', '.join(f'`{choice}`' for choice in leaf.choices)}."
    if leaf.planned:
        meaning += f" Not yet: {', '.join(leaf.planned)}."
    for word, why in leaf.impossible.items():
        meaning += f" Not {word}: {why}."
    if leaf.plug_in:
        meaning += " Your own: `package.module:attribute`."
    if leaf.bounds:
        meaning += f" Must be {_bounds(leaf)}."
    if isinstance(refusal, rules.Refusal):
        meaning += f" Refused for now: {refusal.reason}."
    elif isinstance(reason, str):
        meaning += f" No effect for now: {reason}."
    default = f"follows `{leaf.follows}`" if leaf.follows else f"`{show(leaf.default)}`"
    return f"| `{name}` | {default} | {meaning} |\n".replace("||", "|")


def _bounds(leaf: Leaf) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {show(bound)}" for name, bound in leaf.bounds.items())


def field_docs(cls: type[Section]) -> dict[str, str]:
    """The text under each field of a dataclass, on one line; a field that it inherits has its text there."""
    base = cls.__base__
    inherited = field_docs(base) if base is not None and issubclass(base, Section) and base is not Section else {}
    return inherited | _own_field_docs(cls)


def _own_field_docs(cls: type[Section]) -> dict[str, str]:
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            docs[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return docs


def _renamed(tree: Tree, whose: str) -> Iterator[str]:
    yield f"## Other names{whose}\n\nApplied, with a notice.\n"
    rows = "".join(f"| `{old}` | `{new}` |\n" for old, new in tree.rules.renamed.items())
    per_worker = "".join(
        f"| `{old}` (over all workers) | `{new}` (for each worker) |\n"
        for old, new in tree.rules.global_micro_batches.items()
    )
    yield f"| typed | is |\n|---|---|\n{rows}{per_worker}"


def _no_effect(tree: Tree, whose: str) -> Iterator[str]:
    yield f"## Accepted without effect{whose}\n\nA notice says so, with the reason. `.*` stands for everything below.\n"
    by_reason: dict[str, list[str]] = {}
    for key, reason in tree.rules.no_effect.items():
        if key not in tree.leaves:
            by_reason.setdefault(reason, []).append(f"`{key}`")
    for reason, keys in by_reason.items():
        yield f"- {reason[:1].upper()}{reason[1:]}: {', '.join(keys)}"


def _refused(tree: Tree, whose: str) -> Iterator[str]:
    yield f"\n## Refused{whose}\n\nAn error, unless the value asks for nothing.\n"
    by_reason: dict[str, list[str]] = {}
    for key, refusal in tree.rules.refused.items():
        if key not in tree.leaves:
            harmless = f" (`{show(refusal.harmless[0])}` is accepted)" if refusal.harmless else ""
            by_reason.setdefault(refusal.reason, []).append(f"`{key}`{harmless}")
    for reason, keys in by_reason.items():
        yield f"- {reason[:1].upper()}{reason[1:]}: {', '.join(keys)}"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(generate())
