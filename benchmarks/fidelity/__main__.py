"""Does burnish sample from the model's own distribution, and is its gradient the loss's?

    python -m benchmarks.fidelity --json                                    # SmolLM2 on chain sums; a GPU: bfloat16
    python -m benchmarks.fidelity --model smollm2 runs/mine/global_step_40/actor --engines native hf vllm
    python -m benchmarks.fidelity --task tiny --samples 64                  # a CPU, a minute
    python -m benchmarks.fidelity --show docs/results/fidelity-h200.json    # the tables of a file that --out wrote

Samples: every engine answers the same prompts at temperature 1, each with its own sampler and random numbers (burnish's native
one, transformers' ``generate``, vLLM). Told are the share of right answers, and the mean of -log p(token) - entropy under
transformers' model in float32: 0 is expected of tokens that were drawn from it, whatever they are, so a sampler that draws
too hot, too cold or from anything else shows without a reference for the right answers.

Gradients: of GRPO's loss on responses of transformers' (or the first engine's), by burnish's engine and loss as the actor calls
them, and by transformers' model with autograd: in float32, which is what all are measured against, and as trainers use bfloat16.
Told are the cosine, the length, and what the gradient moves along the exact one.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402

from benchmarks.demo import machine  # noqa: E402
from benchmarks.fidelity import gradients, sampling  # noqa: E402
from benchmarks.fidelity.sampling import Questions, Responses  # noqa: E402
from benchmarks.learning.__main__ import TASKS  # noqa: E402
from benchmarks.models import model_path  # noqa: E402
from benchmarks.results import place, write_figures  # noqa: E402


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model, printed as they come."""
    model, task = model_path(name), TASKS[args.task]
    questions = Questions.read(
        model,
        Path(task["train"]),
        limit=args.prompts,
        samples=args.samples,
        max_tokens=task["response_length"],
        reward=task["reward"],
    )
    print(f"{label(name)}: {len(questions.prompts)} prompts x {questions.samples} samples", flush=True)
    exact = sampling.exact_model(model, args.device)
    drawn: dict[str, tuple[Responses, torch.Tensor]] = {}
    samples = {}
    for key, ask in engines(model, args).items():
        responses = ask(questions)
        scores = questions.scores(model, responses)
        drawn[key] = responses, scores
        samples[key] = {
            **sampling.described(questions, scores, responses),
            **sampling.surprise(exact, questions, responses, args.read_every),
        }
        print(sample_line(key, samples[key]), flush=True)
    del exact
    found: dict[str, Any] = {"model": label(name), "prompts": len(questions.prompts), "samples": samples}
    if args.gradient_prompts:
        source = next((key for key in drawn if key.startswith("hf")), next(iter(drawn)))
        found |= {"rows_of": source, "gradients": measure_gradients(model, questions, *drawn[source], args)}
    return found


def label(name: str) -> str:
    """A model in figures: its name, its folder's, or the step that a run kept it after."""
    step = next((part.rpartition("_")[2] for part in Path(name).parts if part.startswith("global_step_")), None)
    return Path(name).name if step is None else f"after step {step}"


def engines(model: str, args: argparse.Namespace) -> dict[str, sampling.Engine]:
    """What is asked, by engine and dtype."""
    found: dict[str, sampling.Engine] = {}
    for name in args.engines:
        for dtype in args.dtypes if name != "vllm" else args.dtypes[:1]:
            found[f"{name} {dtype}"] = (
                sampling.native(model, dtype, args.device, memory=args.engine_memory)
                if name == "native"
                else sampling.peer(name, model, dtype, args.device, args.logs, memory=args.engine_memory)
            )
    return found


def measure_gradients(
    model: str, questions: Questions, responses: Responses, scores: torch.Tensor, args: argparse.Namespace
) -> dict[str, Any]:
    """Of the first prompts' responses, so many to each as in training."""
    few, samples = args.gradient_prompts, TASKS[args.task]["samples"]
    kept = [
        response
        for prompt in range(min(few, len(questions.prompts)))
        for response in responses[prompt * questions.samples :][:samples]
    ]
    weights = gradients.advantages(scores[:few, :samples])
    asked = replace(questions, rows=questions.rows[:few], prompts=questions.prompts[:few], samples=samples)
    device = args.device
    exact = gradients.plain(model, "float32", device)(asked, kept, weights)
    sides = {
        "burnish float32": gradients.ours(model, "float32", device),
        "burnish bfloat16": gradients.ours(model, "bfloat16", device),
        "transformers, bfloat16 by autocast": gradients.plain(model, "bfloat16", device, autocast=True),
        "transformers, weights in bfloat16": gradients.plain(model, "bfloat16", device),
    }
    found: dict[str, Any] = {}
    for key, gradient in sides.items():
        found[key] = gradients.compare(gradient(asked, kept, weights), exact)
        print(gradient_line(key, found[key]), flush=True)
    return {"prompts": len(asked.prompts), "samples": samples, "tokens": sum(map(len, kept)), "sides": found}


def sample_line(key: str, one: dict[str, float]) -> str:
    """One engine, for people."""
    return (
        f"  {key:16} right {one['right']:.4f} ({one['right_error']:.4f}), tokens {one['tokens']:.2f}, "
        f"surprise - entropy {one['surprise']:+.4f} ({one['surprise_error']:.4f}), entropy {one['entropy']:.4f}"
    )


def gradient_line(key: str, one: dict[str, Any]) -> str:
    """One side, for people."""
    return (
        f"  {key:36} cosine {one['cosine']:.5f}, length {one['length']:.4f}, along {one['along']:.4f}, "
        f"worst {one['worst_cosine']:.4f} ({one['worst']})"
    )


def tables(result: dict[str, Any]) -> str:
    """Samples and gradients of all models in Markdown."""
    lines = [
        "| model | engine | right answers, % | tokens a response | surprise - entropy, nats a token |",
        "|---|---|---|---|---|",
    ]
    for found in result["models"]:
        for engine, one in found["samples"].items():
            lines.append(
                f"| {found['model']} | {engine} | {100 * one['right']:.2f} ({100 * one['right_error']:.2f}) | "
                f"{one['tokens']:.2f} | {one['surprise']:+.4f} ({one['surprise_error']:.4f}) |"
            )
    lines += ["", "| model | gradient by | cosine | length | along the exact one |", "|---|---|---|---|---|"]
    for found in result["models"]:
        for side, one in found.get("gradients", {"sides": {}})["sides"].items():
            lines.append(
                f"| {found['model']} | {side} | {one['cosine']:.5f} | {one['length']:.4f} | {one['along']:.4f} |"
            )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="smollm2", help="prompts, lengths and reward")
    parser.add_argument("--model", nargs="+", help="names or folders; the task's")
    parser.add_argument("--engines", nargs="+", choices=["native", "hf", "vllm"], default=["native", "hf"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], help="of the engines; vLLM has the first"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--prompts", type=int, default=512 if on_gpu else 64)
    parser.add_argument("--samples", type=int, default=128 if on_gpu else 16, help="of each prompt")
    parser.add_argument("--read-every", type=int, default=4, help="so many responses to one that is read in float32")
    parser.add_argument("--gradient-prompts", type=int, default=512 if on_gpu else 64, help="0: no gradients")
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU for what samples")
    parser.add_argument("--logs", type=Path, help="folder of the peers' logs (a temporary one)")
    parser.add_argument("--out", type=Path, help="file of the figures")
    parser.add_argument("--show", type=Path, help="run nothing, print the tables of this file")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.samples < TASKS[args.task]["samples"] and args.gradient_prompts:
        parser.error(
            f"gradients are of {TASKS[args.task]['samples']} samples a prompt, and --samples is {args.samples}; "
            f"give more, or --gradient-prompts 0."
        )
    if args.show is not None:
        if not args.show.exists():
            parser.error(f"there is no {args.show} to show.")
        return args
    if not Path(TASKS[args.task]["train"]).exists():
        parser.error(
            f"{TASKS[args.task]['train']} is not there; `python -m examples.reasoning.data` makes the rows of its tasks."
        )
    args.model = args.model or [TASKS[args.task]["model"]]
    args.dtypes = args.dtypes or (["bfloat16", "float32"] if on_gpu else ["float32"])
    args.logs = args.logs or Path(tempfile.mkdtemp(prefix="burnish-fidelity-"))
    args.logs.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    """Measures, prints."""
    args = parse()
    if args.show is not None:
        print(tables(json.loads(args.show.read_text(encoding="utf-8"))))
        return
    print(f"{machine()}; logs in {args.logs}", flush=True)
    models = []
    for name in args.model:
        models.append(measure(name, args))
        result = {"task": args.task, "models": models}
        if args.out is not None:
            write_figures(args.out, result)
    print(tables(result))
    if args.json:
        print(json.dumps(place() | result, separators=(",", ":")))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
