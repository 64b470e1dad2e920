"""The commands that make files of data, with their options: ``burnish data ...``."""

from __future__ import annotations

from typing import Annotated

import typer

from burnish.utils.console import console

data_app = typer.Typer(help="Make files of training data.", no_args_is_help=True)


@data_app.command(name="reasoning_gym")
def reasoning_gym(
    task: Annotated[
        list[str] | None, typer.Option(help="A task of reasoning-gym, as chain_sum; may be given several times.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Rows of training, of each task.")] = 5000,
    test_size: Annotated[int, typer.Option(min=1, help="Rows of testing, of each task.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the first row.")] = 0,
    out: Annotated[str, typer.Option(help="Folder for train.parquet and test.parquet.")] = "~/data/reasoning_gym",
    parameters: Annotated[
        list[str] | None, typer.Option("--set", help="A parameter of the task, as min_terms=3; several times.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="What is said behind each question, '' for nothing; else to answer in tags.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Name the tasks and end.")] = False,
) -> None:
    """Write questions of reasoning-gym, which its own verifiers score (the extra reasoning-gym)."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.data import list_tasks, run_reasoning_gym

        if list_only:
            console.print("\n".join(list_tasks()))
            return 0
        return run_reasoning_gym(
            task or [],
            size=size,
            test_size=test_size,
            seed=seed,
            out=out,
            parameters=parameters or [],
            instruction=instruction,
        )

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the files were written."))


@data_app.command(name="sft-from-responses")
def sft_from_responses(
    source: Annotated[
        str, typer.Argument(help="File that burnish generate or eval wrote (--out), or a run's folder with rollouts.")
    ],
    out: Annotated[str, typer.Option(help="File of conversations to write, .jsonl.")],
    min_score: Annotated[
        float | None, typer.Option(help="Take responses of this score at least; left out: whatever their score.")
    ] = None,
    max_per_prompt: Annotated[
        int | None, typer.Option(min=1, help="Take the best so many of each prompt; left out: all that differ.")
    ] = None,
    prompt_key: Annotated[str, typer.Option(help="Column of the prompts in a file.")] = "prompt",
) -> None:
    """Write responses that scored well as conversations for burnish sft (rejection sampling, a cold start)."""
    from burnish.trainer.ending import exit_status

    def run() -> int:
        from burnish.cli.data_responses import run_sft_from_responses

        return run_sft_from_responses(
            source, out, min_score=min_score, max_per_prompt=max_per_prompt, prompt_key=prompt_key
        )

    raise typer.Exit(exit_status(run, when_stopped="Stopped before the file was written."))
