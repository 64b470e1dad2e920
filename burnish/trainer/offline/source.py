"""Which model a name stands for: a folder, a checkpoint or a run, on this machine or at a URL, or a name of the hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from burnish.config.data_names import hub_name
from burnish.engine.checkpoint import has_value_head
from burnish.model.lora import CONFIG_FILE as ADAPTER_FILE
from burnish.trainer.ppo.checkpoints.folders import BEST, RUN_ID, TRACKER
from burnish.trainer.ppo.checkpoints.manifest import MANIFEST, STATE, problem_of
from burnish.utils import local_paths, storage
from burnish.utils.errors import ConfigError

Role = Literal["actor", "critic"]
_VERL_SHARD = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_STEP_FOLDER = re.compile(r"global_step_(\d+)")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that was found.

    Attributes:
        name: as it was asked for.
        folder: of the model itself, on this machine; or a name of the hub.
        kind: ``whole`` in Hugging Face format, ``adapters`` in peft's, or ``verl``: shards of verl's FSDP workers.
        role: ``critic`` where it has a value head instead of a language-model head.
        base: of adapters the model that they belong to.
        tokenizer: folder or hub name of its tokenizer; None where there is none.
        step: of its checkpoint, where it is one.
        run_config: ``config.yaml`` of the run that wrote it, where that is still there.
    """

    name: str
    folder: str
    kind: Literal["whole", "adapters", "verl"]
    role: Role = "actor"
    base: str | None = None
    tokenizer: str | None = None
    step: int | None = None
    run_config: Path | None = None

    @property
    def shown(self) -> str:
        """In words, for messages: what was asked for and, where that says more, the folder it led to."""
        return (
            self.name
            if self.folder in (self.name, str(local_paths.expanded(self.name)))
            else f"{self.name} ({self.folder})"
        )

    @property
    def model_path(self) -> str:
        """Where the model's configuration and weights are, of adapters those of their base: a folder or a name of the hub."""
        return self.folder if self.base is None else self.base

    @property
    def override_config(self) -> dict[str, Any]:
        """What the run that trained adapters has changed in the configuration of their base; a whole model's has it in it."""
        tree: Any = self.run_values() if self.kind == "adapters" else {}
        # A run of supervised fine-tuning has its one model at the top.
        section = "critic" if self.role == "critic" else "actor_rollout_ref"
        for name in (*([section] if section in tree else []), "model", "override_config"):
            tree = tree.get(name) if isinstance(tree, dict) else None
        return dict(tree or {})

    def run_values(self) -> dict[str, Any]:
        """The configuration of the run that wrote it, as nested dictionaries; empty where that is not there.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.run_config is None:
            return {}
        try:
            tree = yaml.safe_load(self.run_config.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"The run's {self.run_config} cannot be read: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"The run's {self.run_config} is no configuration.")
        return tree


def find_model(name: str, *, role: Role | None = None, base: str | None = None) -> ModelSource:
    """The model that ``name`` stands for.

    Args:
        name: a model's folder (Hugging Face format, peft's, or verl's shards), ``global_step_N`` or its ``actor`` or
            ``critic``, a run's folder (its newest checkpoint; ``RUN@best``, ``RUN@20`` another one), a URL of any of these, or
            a name of the hub.
        role: which model of a checkpoint is wanted; None: the actor.
        base: the base of adapters, instead of the one that their file names.

    Raises:
        ConfigError: there is no model, or no such checkpoint.
        StorageError: what a URL names cannot be fetched.
    """
    place, chosen = _split(name)
    place = place if storage.is_remote(place) else str(local_paths.expanded(place))
    step = _step_of(place)
    if not storage.is_folder(place):
        return _on_hub(name, place)
    if _run_steps(place) and not _is_model(place):
        step = _choose_step(name, place, chosen)
        place = storage.join(place, f"global_step_{step}")
    elif chosen is not None:
        raise ConfigError(
            f"{name}: {storage.shown(place)} holds no checkpoints (global_step_N) to choose {chosen} from."
        )
    if not _is_model(place):
        place = _part_of_checkpoint(name, place, role)
    elif role == "critic" and storage.name_of(place) != "critic":
        raise ConfigError(f"{name}: this is a model already, not a checkpoint with a critic in it.")
    step = _step_of(place) if step is None else step
    folder = storage.localize(place)
    run_config = _run_config(place)
    return _described(name, folder, step, base, run_config)


def _split(name: str) -> tuple[str, str | None]:
    """The place and what follows its last ``@``; a folder that is called so is taken as it is."""
    place, at, chosen = name.rpartition("@")
    if not at or "/" in chosen or storage.is_folder(name):
        return name, None
    if not (chosen in ("newest", "best") or chosen.isdigit()):
        raise ConfigError(f"{name}: behind @ stands newest, best or the number of a step.")
    return place, chosen


def _on_hub(name: str, place: str) -> ModelSource:
    if storage.is_remote(place) or hub_name(name) is None:
        where = storage.shown(place) if storage.is_remote(place) else str(Path(place).absolute())
        raise ConfigError(
            f"{name}: there is no folder {where}. Name a model's folder, a checkpoint (global_step_N), a run's folder, or a "
            f"model of the hub as org/name."
        )
    return ModelSource(name=name, folder=name, kind="whole", tokenizer=name)


def _is_model(place: str) -> bool:
    return any(storage.exists(storage.join(place, file)) for file in ("config.json", ADAPTER_FILE)) or (_is_verl(place))


def _is_verl(place: str) -> bool:
    return any(_VERL_SHARD.fullmatch(storage.name_of(file)) for file in storage.files_in(place))


def _run_steps(place: str) -> list[int]:
    found = map(_STEP_FOLDER.fullmatch, storage.list_folders(place))
    return sorted(int(match.group(1)) for match in found if match)


def _choose_step(name: str, run: str, chosen: str | None) -> int:
    """The newest complete checkpoint, the best, or the one that was asked for."""
    complete = [step for step in _run_steps(run) if _is_complete(storage.join(run, f"global_step_{step}"))]
    if not complete:
        raise ConfigError(
            f"{name}: {storage.shown(run)} holds no complete checkpoint, only: {_listed(_run_steps(run))}."
        )
    if chosen in (None, "newest"):
        # Which is not the highest number where an older run left some.
        last = _number_in(storage.join(run, TRACKER))
        return last if last in complete else max(complete)
    if chosen == "best":
        best = _number_in(storage.join(run, BEST))
        if best is None:
            raise ConfigError(
                f"{name}: the run keeps no best checkpoint (trainer.keep_best); it has {_listed(complete)}."
            )
        chosen = str(best)
    if not chosen.isdigit() or int(chosen) not in complete:
        raise ConfigError(f"{name}: there is no complete checkpoint of step {chosen}; there is {_listed(complete)}.")
    return int(chosen)


def _is_complete(checkpoint: str) -> bool:
    if storage.is_remote(checkpoint):
        # The manifest is uploaded last; other systems have none.
        there = any(storage.exists(storage.join(checkpoint, file)) for file in (MANIFEST, STATE))
    else:
        there = problem_of(Path(checkpoint)) is None
    actor = storage.join(checkpoint, "actor")
    return there or (storage.is_folder(actor) and _is_verl(actor))


def _number_in(file: str) -> int | None:
    text = storage.read_text(file).strip() if storage.exists(file) else ""
    return int(text) if text.isdigit() else None


def _part_of_checkpoint(name: str, place: str, role: Role | None) -> str:
    """The folder of the wanted model in a checkpoint."""
    wanted = role or "actor"
    part = storage.join(place, wanted)
    if storage.is_folder(part) and _is_model(part):
        return part
    files = set(map(storage.name_of, storage.files_in(place)))
    if RUN_ID in files:
        raise ConfigError(
            f"{name}: this run has saved no checkpoint. Train it with trainer.save_freq above 0, which saves its last step too."
        )
    inside = ", ".join(sorted({*storage.list_folders(place), *files})[:20])
    where = (
        f"no {wanted}" if role else "no model: neither config.json nor adapter_config.json, nor a folder actor with one"
    )
    raise ConfigError(f"{name}: {storage.shown(place)} holds {where}. It holds: {inside or 'nothing'}.")


def _described(name: str, folder: str, step: int | None, base: str | None, run_config: Path | None) -> ModelSource:
    path = Path(folder)
    role: Role = "critic" if has_value_head(folder) or _is_critic(path) else "actor"
    common: dict[str, object] = {"name": name, "folder": folder, "role": role, "step": step, "run_config": run_config}
    if (path / ADAPTER_FILE).exists():
        base = base or _base_of(path)
        tokenizers = [folder, str(path.parent / "actor"), base]
        return ModelSource(**common, kind="adapters", base=base, tokenizer=_tokenizer(tokenizers))  # type: ignore[arg-type]
    if base is not None:
        raise ConfigError(f"--base={base}: {folder} is a whole model, not an adapter, and needs no base.")
    if _is_verl(folder):
        tokenizers = [str(path / "huggingface"), folder]
        return ModelSource(**common, kind="verl", tokenizer=_tokenizer(tokenizers))  # type: ignore[arg-type]
    return ModelSource(**common, kind="whole", tokenizer=_tokenizer([folder, str(path.parent / "actor")]))  # type: ignore[arg-type]


def _is_critic(path: Path) -> bool:
    return path.name == "critic" and _step_of(str(path)) is not None


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except ValueError as error:
        raise ConfigError(f"{folder / ADAPTER_FILE} cannot be read: {error}") from error
    if not base:
        raise ConfigError(f"{folder / ADAPTER_FILE} names no base model. Name it by --base.")
    looks_local = base.startswith(("/", "~", "."))
    if looks_local and not local_paths.is_dir(base):
        raise ConfigError(
            f"{folder / ADAPTER_FILE} names the base model {base}, and there is no such folder here. Name it by --base."
        )
    return str(base)


def _tokenizer(places: list[str]) -> str | None:
    for place in places:
        if not local_paths.is_dir(place):
            # A base on the hub: what is there is seen when it is loaded.
            if hub_name(place) is not None:
                return place
            continue
        if any((Path(place) / file).exists() for file in _TOKENIZER_FILES):
            return place
    return None


def _step_of(place: str) -> int | None:
    """The step in the name of the folder or of the one above it."""
    for part in reversed(place.rstrip("/").split("/")[-2:]):
        if match := _STEP_FOLDER.fullmatch(part):
            return int(match.group(1))
    return None


def _run_config(place: str) -> Path | None:
    """``config.yaml`` beside the checkpoints; of a run on this machine alone."""
    if storage.is_remote(place):
        return None
    for folder in Path(place).absolute().parents[:2]:
        if (folder / "config.yaml").is_file() and _STEP_FOLDER.search(place):
            return folder / "config.yaml"
    return None


def _listed(steps: list[int]) -> str:
    return ", ".join(f"step {step}" for step in sorted(steps)) or "none"
