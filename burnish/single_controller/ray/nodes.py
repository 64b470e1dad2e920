"""What the nodes of a cluster have of this run: its code, its packages, its files. Asked before anything is started there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

PACKAGES = ("torch", "transformers", "ray")
"""Whose versions are compared."""
_SECONDS_TO_ANSWER = 180.0


@dataclass(frozen=True)
class NodeFacts:
    """What one node said.

    Attributes:
        address: of the node.
        python: version of the interpreter that Ray runs there.
        executable: where it lies.
        burnish: version of the package that is imported there; empty where none can be.
        folder: where it lies.
        fingerprint: of its source code.
        problem: why burnish cannot be imported, or that the node did not answer; empty otherwise.
        packages: version of each of `PACKAGES`; missing ones have an empty one.
        missing: of the paths that were asked for those that are not there.
    """

    address: str
    python: str = ""
    executable: str = ""
    burnish: str = ""
    folder: str = ""
    fingerprint: str = ""
    problem: str = ""
    packages: Mapping[str, str] | None = None
    missing: tuple[str, ...] = ()


def survey(nodes: Mapping[str, str], paths: Sequence[str]) -> list[NodeFacts]:
    """Asks each node at the same time; a process is started on each for it, and Ray must be connected.

    Args:
        nodes: id and address of each node.
        paths: absolute paths of files and folders that should be there.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(_make_question())
    refs = {}
    for node, address in nodes.items():
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        refs[ask.options(scheduling_strategy=strategy).remote(list(paths), PACKAGES)] = address
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=_SECONDS_TO_ANSWER)
    found = []
    for ref, address in refs.items():
        if ref not in done:
            found.append(NodeFacts(address, problem=f"it did not start a process within {_SECONDS_TO_ANSWER:.0f} s"))
            continue
        try:
            found.append(facts_of(address, ray.get(ref)))
        except ray.exceptions.RayError as error:
            found.append(NodeFacts(address, problem=_last_line(error)))
    return found


def here(address: str) -> NodeFacts:
    """The facts of this process, to compare with."""
    return facts_of(address, _make_question()([], PACKAGES))


def facts_of(address: str, answer: str) -> NodeFacts:
    """What `_make_question`'s function returned on the node at ``address``."""
    said: dict[str, Any] = json.loads(answer)
    return NodeFacts(**said | {"address": address, "missing": tuple(said["missing"])})


def _make_question() -> Any:
    """A function that travels as what it consists of, since the other node may have no burnish to import it from."""

    def ask(paths: list[str], packages: tuple[str, ...]) -> str:
        import hashlib
        import importlib
        import json
        import os
        import sys
        from importlib import metadata

        said: dict[str, Any] = {
            "python": "{}.{}".format(*sys.version_info[:2]),
            "executable": sys.executable,
            "missing": [path for path in paths if not os.path.exists(path)],
            "packages": {},
        }
        for package in packages:
            try:
                said["packages"][package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                said["packages"][package] = ""
        try:
            burnish = importlib.import_module("burnish")
        except ImportError as error:
            said["problem"] = f"{type(error).__name__}: {error}"
            return json.dumps(said)
        folder = os.path.dirname(os.path.abspath(str(burnish.__file__)))
        digest = hashlib.sha256()
        for parent, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted(files):
                if name.endswith((".py", ".cpp", ".h")):
                    path = os.path.join(parent, name)
                    digest.update(os.path.relpath(path, folder).encode())
                    with open(path, "rb") as file:
                        digest.update(file.read())
        said |= {"burnish": burnish.__version__, "folder": folder, "fingerprint": digest.hexdigest()[:12]}
        return json.dumps(said)

    return ask


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
