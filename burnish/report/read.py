"""The files of a run as the report needs them. Everything may be missing, half written or odd: what cannot be read is noted."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from burnish.config.origin import ORIGIN_FILE
from burnish.config.schema import leaves
from burnish.report.rollouts import Dumps, stamp_of
from burnish.report.series import Series, is_number
from burnish.report.tail import Tail
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError
from burnish.utils.events import EVENTS_FILE
from burnish.utils.secrets import redact

METRICS_FILE = "metrics.jsonl"
HEARTBEAT_FILE = "heartbeat.json"
CONFIG_FILE = "config.yaml"
_SILENT_AFTER_S = 120.0
_GRACE_S = 30.0
# By the exit status of the run: SIGHUP, Ctrl-C and SIGTERM stop it.
_END_STATES = {0: "ended", None: "ended", 129: "stopped", 130: "stopped", 143: "stopped"}
# What else a run leaves, with what it is to be opened by.
_OTHER_FOLDERS = {"profile": "profiler output", "stacks": "stack dumps"}
_MOST_FILES = 60


class RunFolder:
    """A run, read as far as it is there.

    Attributes:
        path: its folder.
        name: as the page calls it.
        series: its metrics.
        events: what happened.
        dumps: its rollouts, by "train" and "validation".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._metrics = Tail(path / METRICS_FILE)
        self._events = Tail(path / EVENTS_FILE, redact)
        self.series = Series([])
        self.dumps: dict[str, Dumps] = {}
        self._problems: list[str] = []
        self._seen: tuple[Any, ...] = ()
        self.config: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Reads what is new; whether there is more than another sign of life."""
        changed = self._metrics.refresh()
        changed = self._events.refresh() or changed
        if changed or not self.series.steps:
            self.series = Series(self._metrics.rows)
        # Signs of life come all the time and change nothing but the status.
        self.heartbeat = _json_file(self.path / HEARTBEAT_FILE)
        seen = tuple(stamp_of(self.path / name) for name in (CONFIG_FILE, ORIGIN_FILE))
        if seen != self._seen:
            self._seen, changed = seen, True
            self._problems = []
            self.config = self._read(CONFIG_FILE, yaml.safe_load) or {}
            self.origins = self._read(ORIGIN_FILE, json.loads) or {}
        for kind, folder in self._dump_folders().items():
            if kind not in self.dumps or self.dumps[kind].folder != folder:
                self.dumps[kind] = Dumps(folder)
            changed = self.dumps[kind].refresh() or changed
        return changed

    @property
    def events(self) -> list[dict[str, Any]]:
        """In the order in which they were written, secrets hidden."""
        return self._events.rows

    @property
    def notes(self) -> list[str]:
        """What the report could not read, or had to leave out, in sentences."""
        notes = list(self._problems)
        for tail in (self._metrics, self._events):
            if tail.num_broken:
                notes.append(f"{tail.path.name}: {tail.num_broken} lines could not be read and are left out.")
        if not self._metrics.path.exists():
            notes.append(f"There is no {METRICS_FILE}: the run has logged no step yet, or the file was moved away.")
        if self.series.num_odd:
            notes.append(f"{METRICS_FILE}: {self.series.num_odd} values are no numbers and are left out.")
        for kind, dumps in self.dumps.items():
            if dumps.num_broken:
                notes.append(f"{kind} rollouts: {dumps.num_broken} lines could not be read and are left out.")
            notes += [f"{kind} rollouts: {problem}" for problem in dumps.problems]
        return notes

    def key(self, name: str, default: Any = None) -> Any:
        """A value of the run's configuration by its dotted key; what config.yaml does not have is ``default``."""
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    def configuration(self) -> dict[str, list[Any]]:
        """Key -> [value, origin]; a run that wrote no origins has "default" and "not the default"."""
        if isinstance(self.origins, dict) and self.origins:
            table = {key: entry for key, entry in self.origins.items() if isinstance(entry, dict)}
            return {key: [redact(entry.get("value"), key), str(entry.get("origin"))] for key, entry in table.items()}
        defaults = {key: leaf.default for key, leaf in leaves().items()}
        return {
            key: [redact(value, key), "default" if defaults.get(key) == value else "not the default"]
            for key, value in _flat(self.config)
        }

    def status(self) -> dict[str, Any]:
        """How the run stands: ``state`` (running, ended, stopped, failed, silent, unknown), a sentence, the last step and the
        planned ones."""
        beat = self.heartbeat if isinstance(self.heartbeat, dict) else {}
        step = self.series.steps[-1] if self.series.steps else None
        total = next(filter(is_number, (beat.get("total_steps"), self.key("trainer.total_training_steps"))), None)
        events = [event for event in self._events.rows if event.get("kind") in ("start", "resume", "restart", "end")]
        status: dict[str, Any] = {
            "step": step,
            "total": total,
            "stage": beat.get("stage"),
            "workers": workers if isinstance(workers := beat.get("workers"), dict) else None,
        }
        status["time"] = max(
            filter(is_number, (beat.get("time"), *(e.get("time") for e in self._events.rows))), default=0
        )
        beaten = beat["time"] if is_number(beat.get("time")) else None
        if events and events[-1].get("kind") == "end":
            ended = time_ if is_number(time_ := events[-1].get("time")) else None
            # A run that goes on after its end shows it by its signs of life first.
            if beaten is None or beat.get("stage") == "ended" or not ended or beaten <= ended + _GRACE_S:
                state = next(
                    (_END_STATES[code] for code in _END_STATES if code == events[-1].get("status", 0)), "failed"
                )
                return status | {"state": state, "text": str(events[-1].get("message", "The run has ended."))}
        if beat.get("stage") == "ended":
            return status | {"state": "ended", "text": "The run has ended."}
        age = None if beaten is None else time.time() - beaten
        if age is None:
            return status | {"state": "unknown", "text": "The run has left no sign of life and no word of its end."}
        if age > _SILENT_AFTER_S:
            text = f"No sign of life for {_duration(age)}, and no word of the run's end: it may have been killed."
            return status | {"state": "silent", "text": text}
        return status | {"state": "running", "text": f"Running, in stage {beat.get('stage')}."}

    def files(self) -> list[dict[str, Any]]:
        """What else lies in the run's folder: checkpoints, profiles, stack dumps."""
        found = []
        for folder in sorted(self.path.glob("global_step_*"), key=_number):
            manifest = _json_file(folder / "manifest.json")
            sizes = manifest.get("files") if isinstance(manifest, dict) else None
            size = sum(s for s in sizes.values() if isinstance(s, int)) if isinstance(sizes, dict) else None
            found.append({"path": folder.name, "what": "checkpoint", "bytes": size})
        profiles = {self.path / name: what for name, what in _OTHER_FOLDERS.items()}
        if saved := self.key("global_profiler.save_path"):
            profiles.setdefault(local_paths.expanded(str(saved)), _OTHER_FOLDERS["profile"])
        for folder, what in profiles.items():
            files = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
            for file in files[:_MOST_FILES]:
                _, size = stamp_of(file) or (None, None)
                found.append({"path": os.path.relpath(file, self.path), "what": what, "bytes": size})
            if len(files) > _MOST_FILES:
                more = f"{len(files) - _MOST_FILES} more in {os.path.relpath(folder, self.path)}"
                found.append({"path": more, "what": what, "bytes": None})
        return found

    def tokenizer_file(self) -> Path | None:
        """The tokenizer of the run's policy, where it lies on this computer."""
        sections = ("actor_rollout_ref.model", "model")
        names = [self.key(f"{section}.{name}") for section in sections for name in ("tokenizer_path", "path")]
        folders = [local_paths.expanded(str(name)) for name in names if name]
        folders += [folder / "actor" for folder in sorted(self.path.glob("global_step_*"), key=_number, reverse=True)]
        cache = local_paths.expanded("~/.cache/huggingface/hub")
        for name in names:
            if name and str(name).count("/") == 1:
                folders += sorted(cache.glob(f"models--{str(name).replace('/', '--')}/snapshots/*"))
        return next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)

    def _dump_folders(self) -> dict[str, Path]:
        folders = {}
        for kind, name, key in (
            ("train", "rollouts", "rollout_data_dir"),
            ("validation", "validation", "validation_data_dir"),
        ):
            chosen = self.key(f"trainer.{key}")
            places = [local_paths.expanded(str(chosen)), self.path / Path(str(chosen)).name] if chosen else []
            places.append(self.path / name)
            # A run that was moved has its dumps beside its metrics, wherever the key points to.
            folders[kind] = next((place for place in places if place.is_dir()), places[-1])
        return folders

    def _read(self, name: str, parse: Any) -> Any:
        try:
            return parse((self.path / name).read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            if name == CONFIG_FILE:
                self._problems.append(f"There is no {name}, so settings and advice that depends on them are missing.")
        except (OSError, ValueError, yaml.YAMLError) as error:
            self._problems.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
        return None


def open_runs(paths: Sequence[str]) -> list[RunFolder]:
    """The runs in the folders ``paths``, named so that they can be told apart.

    Raises:
        ConfigError: a folder is none, or has nothing of a run in it.
    """
    folders = []
    for text in paths:
        path = local_paths.expanded(text)
        if local_paths.is_file(path) and path.name == METRICS_FILE:
            path = path.parent
        if not local_paths.is_dir(path):
            raise ConfigError(f"{text}: there is no such folder. Name a run's folder, its trainer.default_local_dir.")
        path = path.resolve()
        if path in folders:
            raise ConfigError(f"{text} is named twice.")
        known = (METRICS_FILE, CONFIG_FILE, EVENTS_FILE, HEARTBEAT_FILE)
        if not any((path / name).exists() for name in known) and not list(path.glob("rollouts/*.jsonl")):
            below = sorted(str(file.parent) for file in path.glob(f"*/{METRICS_FILE}"))
            hint = f" There are runs below it: {', '.join(below[:4])}." if below else ""
            raise ConfigError(f"{text} is no run's folder: it has no {METRICS_FILE} and no {CONFIG_FILE}.{hint}")
        folders.append(path)
    runs = [RunFolder(path) for path in folders]
    for depth in range(1, 8):
        names = ["/".join(path.parts[-depth:]) for path in folders]
        if len(set(names)) == len(names):
            break
    for run, name in zip(runs, names, strict=True):
        run.name = name
    return runs


def _flat(values: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(values, dict) or (not values and prefix):
        return [(prefix, values)] if prefix else []
    return [
        pair for name, value in values.items() for pair in _flat(value, f"{prefix}.{name}" if prefix else str(name))
    ]


def _number(folder: Path) -> int:
    digits = folder.name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
