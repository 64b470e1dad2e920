"""Whether the nodes of a cluster are fit for a run: the same code everywhere, its files in sight, one folder for checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, policy_of
from burnish.utils import storage
from burnish.utils.errors import ResourceError
from burnish.utils.local_paths import exists, expanded, is_dir

if TYPE_CHECKING:
    from burnish.single_controller.ray.nodes import NodeFacts


logger = logging.getLogger("burnish.trainer")


@dataclass
class NodeProblems:
    """What was found, in sentences.

    Attributes:
        errors: the run would fail, or leave something nobody can use.
        warnings: it may.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Needs:
    """What the nodes of a run must see.

    Attributes:
        run_dir: ``trainer.default_local_dir``, as it was given.
        saves: whether checkpoints are written there, by workers.
        files: absolute paths of models and code that workers read; data are read by the driver alone.
    """

    run_dir: str
    saves: bool
    files: tuple[str, ...]


def needs_of(config: PPOTrainerConfig | SFTTrainerConfig) -> Needs:
    """Of a run, whichever trainer it is for."""
    policy, trainer = policy_of(config).model, config.trainer
    named: list[Any] = [policy.path, policy.tokenizer_path, policy.lora_adapter_path]
    if isinstance(config, PPOTrainerConfig):
        scorer = config.reward.reward_model
        if config.critic.enable:
            named.append(config.critic.model.path)
        if scorer.enable:
            named.append(scorer.model_path)
        named.append(config.reward.custom_reward_function.path)
    saves = trainer.save_freq > 0 or trainer.keep_best is not None
    return Needs(trainer.default_local_dir, saves, local_paths(named))


def local_paths(named: Iterable[str | None]) -> tuple[str, ...]:
    """Those of the models and files ``named`` that are on this machine's disk, as absolute paths."""
    paths = [expanded(name).absolute() for name in named if name and not storage.is_remote(str(name))]
    # What is not here either is a name of the hub, or was refused before.
    return tuple(str(path) for path in dict.fromkeys(paths) if exists(path))


def look_at_nodes(nodes: Mapping[str, str], needs: Needs) -> NodeProblems:
    """Asks the nodes and compares them with this process. Ray must be connected; a process is started on each other node.

    Args:
        nodes: id and address of each node that the run uses.
    """
    import ray

    from burnish.single_controller.ray import nodes as cluster_nodes

    me = ray.get_runtime_context().get_node_id()
    others = {node: address for node, address in nodes.items() if node != me}
    if not others:
        return NodeProblems()
    with marked_folder(needs.run_dir) as marker:
        paths = [*needs.files, str(Path.cwd()), *([] if marker is None else [marker])]
        facts = cluster_nodes.survey(others, paths)
    return compare(cluster_nodes.here(ray.util.get_node_ip_address()), facts, needs, marker)


def refuse_unfit_nodes(config: PPOTrainerConfig | SFTTrainerConfig, resource_pool_manager: Any) -> None:
    """Looks at the nodes of the pools before workers are started on them; warnings are logged.

    Args:
        resource_pool_manager: has reserved its pools. Nothing is asked of this process's own node, nor with the local controller.

    Raises:
        ResourceError: all errors.
    """
    if config.trainer.controller == "local":
        return
    from burnish.single_controller.ray.resource_pool import addresses

    # A manager of somebody's own may not say which nodes it took.
    pools = getattr(resource_pool_manager, "resource_pool_dict", {}).values()
    used = {node for pool in pools for node in getattr(pool, "nodes", ())}
    if not used:
        return
    nodes = {node: address for node, address in addresses().items() if node in used}
    problems = look_at_nodes(nodes, needs_of(config))
    for warning in problems.warnings:
        logger.warning("%s", warning)
    if problems.errors:
        raise ResourceError(" ".join(problems.errors))


@contextmanager
def marked_folder(run_dir: str) -> Iterator[str | None]:
    """A file that everybody can see who sees the folder of the run, or the nearest one above it that there is. None where
    none can be made, which is told elsewhere."""
    folder = expanded(run_dir).absolute()
    while not is_dir(folder) and folder != folder.parent:
        folder = folder.parent
    with ExitStack() as made:
        name = None
        with suppress(OSError):
            name = made.enter_context(NamedTemporaryFile(dir=folder, prefix=".burnish_seen_by_all_nodes_")).name
        yield name


def compare(here: NodeFacts, facts: Sequence[NodeFacts], needs: Needs, marker: str | None) -> NodeProblems:
    """What ``facts`` of the nodes mean for a run that is driven from ``here``."""
    found, folder = NodeProblems(), str(Path.cwd())
    for node in facts:
        if node.problem and not node.executable:
            found.errors.append(f"The node {node.address} cannot be asked what it has: {node.problem}.")
            continue
        if node.problem:
            found.errors.append(
                f"The node {node.address} cannot import burnish ({node.problem}). Install burnish {here.burnish} there for "
                f"{node.executable}, with the same packages, or send this code along: "
                f"ray_kwargs.ray_init.runtime_env.py_modules=[{here.folder}]."
            )
            continue
        if node.fingerprint != here.fingerprint:
            versions = f"burnish {node.burnish} (code {node.fingerprint}, in {node.folder})"
            found.errors.append(
                f"The node {node.address} has {versions}, and this process has {here.burnish} (code {here.fingerprint}, in "
                f"{here.folder}): they would not understand each other. Install the same on both, or send this code along: "
                f"ray_kwargs.ray_init.runtime_env.py_modules=[{here.folder}]."
            )
        found.warnings += _other_packages(here, node)
        missing = [path for path in needs.files if path in node.missing]
        if missing:
            found.errors.append(
                f"The node {node.address} has no {', '.join(missing)}, which its workers read. Put it there under the same path, "
                f"or on a file system that all nodes mount."
            )
        if needs.saves and marker in node.missing:
            found.errors.append(
                f"trainer.default_local_dir={needs.run_dir}: the node {node.address} does not see this folder, so its workers "
                f"would write their part of each checkpoint to a disk of their own, and no checkpoint could be read. Name a "
                f"folder on a file system that all nodes mount, or set trainer.save_freq=-1 trainer.keep_best=null."
            )
        if folder in node.missing:
            found.warnings.append(
                f"The node {node.address} has no folder {folder}, where this process runs: relative paths mean something else "
                f"there. Name absolute ones."
            )
    return found


def _other_packages(here: NodeFacts, node: NodeFacts) -> list[str]:
    mine, theirs = dict(here.packages or {}), dict(node.packages or {})
    names = [name for name in mine if mine[name] != theirs.get(name)]
    other = [f"{name} {theirs.get(name) or 'missing'} (here {mine[name] or 'missing'})" for name in names]
    if here.python != node.python:
        other.append(f"Python {node.python} (here {here.python})")
    return [f"The node {node.address} has {', '.join(other)}: results may differ, or fail."] if other else []
