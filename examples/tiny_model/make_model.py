"""Make the tiny model from scratch: a decoder that half-knows two-digit arithmetic.

    python -m examples.tiny_model.make_model       # 7 minutes on two cores; writes model/ and data/ beside this file

It is taught by an uneven teacher who gets a carry or a borrow right with probability `CARE` and otherwise forgets it,
afresh each time a problem comes up. So the model learns both ways of adding and, sampled at temperature 1, takes the
right one about as often: nearly every group of samples has right and wrong answers, which is what makes reinforcement
learning quick. Its greedy answer is the more frequent one, the wrong one.

The same seed, machine and number of threads give the same weights.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.tiny_model.data import FOLDER, Problem, split_problems, write_data
from examples.tiny_model.tokenizer import build_tokenizer

CARE = 0.35
"""Probability that the teacher minds the carry."""
CARRY_SHARE = 0.7
"""Share of the lessons that need a carry or a borrow."""
IGNORED = -100
MAX_ANSWER_TOKENS = 8


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 0.8 million parameters with weights drawn from `seed`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> list[int]:
    """Token ids of the rendered prompt, up to and including the assistant's turn."""
    messages = [{"role": "user", "content": problem.prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


class Lessons:
    """Endless batches of problems answered by the uneven teacher, padded right."""

    def __init__(self, problems: list[Problem], tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pad_id, self.end_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.encode = tokenizer.encode
        self.prompts = {problem: prompt_ids(tokenizer, problem) for problem in problems}
        self.with_carry = [problem for problem in problems if problem.needs_carry]
        self.without_carry = [problem for problem in problems if not problem.needs_carry]

    def draw(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `input_ids` and `labels`, both `[batch, seq]`; only answers have labels."""
        rows = []
        for _ in range(batch_size):
            carry = self.rng.random() < CARRY_SHARE
            problem = self.rng.choice(self.with_carry if carry else self.without_carry)
            answer = problem.answer if self.rng.random() < CARE else problem.careless_answer
            rows.append((self.prompts[problem], [*self.encode(str(answer)), self.end_id]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        input_ids = torch.full((batch_size, width), self.pad_id)
        labels = torch.full((batch_size, width), IGNORED)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            input_ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        return input_ids, labels


def train(
    model: LlamaForCausalLM, lessons: Lessons, *, steps: int, batch_size: int, lr: float, say: Callable[[str], None]
) -> None:
    """Train in place with AdamW: warm-up over the first twentieth, then a cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup),
        ],
        milestones=[warmup],
    )
    start = time.perf_counter()
    for step in range(1, steps + 1):
        input_ids, labels = lessons.draw(batch_size)
        # Rows are padded right and attention is causal: no real token sees padding, so no mask is needed.
        logits = model(input_ids=input_ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps:
            say(f"step {step:5d}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - start:5.0f} s")


@torch.no_grad()
def answer_all(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    *,
    samples: int = 0,
    seed: int = 0,
) -> list[list[str | None]]:
    """Answer every problem greedily (`samples=0`, one answer each) or `samples` times at temperature 1.

    Returns:
        For each problem its answers as text; None where no end of turn came within `MAX_ANSWER_TOKENS`.
    """
    generator = torch.Generator().manual_seed(seed)
    answers: list[list[str | None]] = [[] for _ in problems]
    by_length: dict[int, list[int]] = {}
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).extend([index] * max(1, samples))
    for indices in by_length.values():
        tokens = torch.tensor([prompts[index] for index in indices])
        length = tokens.shape[1]
        for _ in range(MAX_ANSWER_TOKENS):
            logits = model(input_ids=tokens).logits[:, -1]
            if samples:
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], dim=1)
            if (tokens[:, length:] == tokenizer.eos_token_id).any(1).all():
                break
        for index, row in zip(indices, tokens[:, length:].tolist(), strict=True):
            ended = tokenizer.eos_token_id in row
            answers[index].append(tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) if ended else None)
    return answers


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], samples: int = 8
) -> dict[str, float]:
    """Measure how much the model knows of `problems`; every number is a share between 0 and 1."""
    greedy = [answers[0] for answers in answer_all(model, tokenizer, problems)]
    sampled = answer_all(model, tokenizer, problems, samples=samples)
    groups = list(zip(problems, sampled, strict=True))

    def share_right(problem: Problem, answers: list[str | None]) -> float:
        return sum(answer == str(problem.answer) for answer in answers) / len(answers)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    right = [share_right(problem, answers) for problem, answers in groups]
    everything = [answer for answers in sampled for answer in answers]
    return {
        "greedy_accuracy": mean([share_right(p, [a]) for p, a in zip(problems, greedy, strict=True)]),
        "sampled_accuracy": mean(right),
        "sampled_accuracy_with_carry": mean([share_right(p, a) for p, a in groups if p.needs_carry]),
        "sampled_accuracy_without_carry": mean([share_right(p, a) for p, a in groups if not p.needs_carry]),
        "sampled_careless_with_carry": mean(
            [sum(x == str(p.careless_answer) for x in a) / len(a) for p, a in groups if p.needs_carry]
        ),
        "mixed_groups": mean([float(0 < share < 1) for share in right]),
        "well_formed": mean([float(answer is not None and answer.isdecimal()) for answer in everything]),
    }


def main() -> None:
    """Write the data, train, save, and measure on the held-out problems."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder that gets model/ and data/")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure-only", action="store_true", help="measure the model that is there already")
    args = parser.parse_args()

    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    _, test, rest = split_problems()
    if not args.measure_only:
        write_data(args.out / "data")
        tokenizer = build_tokenizer(max_length=512)
        model = build_model(tokenizer, args.seed)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(rest):,} problems to learn from")
        lessons = Lessons(rest, tokenizer, args.seed)
        train(model, lessons, steps=args.steps, batch_size=args.batch_size, lr=args.lr, say=print)
        model.save_pretrained(args.out / "model")
        tokenizer.save_pretrained(args.out / "model")
    model = LlamaForCausalLM.from_pretrained(args.out / "model").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "model")
    print(json.dumps({name: round(value, 3) for name, value in measure(model, tokenizer, test).items()}, indent=1))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
