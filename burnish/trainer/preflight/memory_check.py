"""Compares the memory plan with the device, in sentences."""

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.config.plan import BatchPlan
from burnish.trainer.preflight.findings import Findings
from burnish.trainer.preflight.memory import GIB, MemoryReport, StageMemory, estimate_memory
from burnish.trainer.preflight.steptime import estimate_step_time
from burnish.utils import env
from burnish.utils.device_table import (
    DECODE_EFFICIENCY,
    DEVICES,
    PASS_EFFICIENCY,
    UPDATE_EFFICIENCY,
    DeviceCeilings,
    find_device,
)
from burnish.utils.errors import ConfigError, ModelError

_AREA = "memory"


def named_device(text: str) -> DeviceCeilings:
    """The device that ``--device`` names, as "H100 80GB"; a size that is given counts.

    Raises:
        ConfigError: it is not in the table.
    """
    found = find_device(text) if text else None
    if found is None:
        raise ConfigError(
            f"--device {text!r}: this device is not in the table. Known: {', '.join(device.name for device in DEVICES)}."
        )
    return found


def visible_device(config: PPOTrainerConfig | SFTTrainerConfig) -> tuple[DeviceCeilings | None, int | None]:
    """This machine's device in the table, and its memory; a CPU has no entry."""
    if config.trainer.device != "cuda":
        return None, env.total_memory()
    import torch

    name = torch.cuda.get_device_name()
    return find_device(name), torch.cuda.get_device_properties(0).total_memory


def check_memory(
    config: PPOTrainerConfig, plan: BatchPlan, findings: Findings, *, device: DeviceCeilings | None = None
) -> list[MemoryReport]:
    """Notes each stage's memory, and as errors those that do not fit; then the time of a step.

    Args:
        device: plans for this one instead of the machine's own.
    """
    if device is None:
        known, total = visible_device(config)
        kind, name = config.trainer.device, known.name if known else config.trainer.device
    else:
        known, total, kind, name = device, int(device.memory_gib * GIB), "cuda", device.name
    try:
        reports = estimate_memory(config, plan, device=kind, total_bytes=total)
    except ModelError as error:
        findings.warning(_AREA, f"Memory cannot be estimated: {error}")
        return []
    for report in reports:
        tell_memory(report, name, findings)
    if known is not None and "actor" in reports[0].models:
        models = {role: model for report in reports for role, model in report.models.items()}
        time = estimate_step_time(config, plan, models, known)
        findings.facts["time"] = {"device": known.name, "seconds": time.seconds, "stages": dict(time.stages)}
        parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in time.stages.items())
        findings.note(
            "time",
            f"A step takes about {time.seconds:.1f} s on {known.name} when every response has its full length ({parts}), at "
            f"{DECODE_EFFICIENCY:.0%} of the memory's bandwidth in decoding, {PASS_EFFICIENCY:.0%} of the peak in passes and "
            f"{UPDATE_EFFICIENCY:.0%} in updates; rewards are not in it.",
        )
    return reports


def tell_memory(
    report: MemoryReport, device: str, findings: Findings, *, fsdp: str | None = None, model: str | None = None
) -> None:
    """Notes each stage's memory, and as errors those that do not fit.

    Args:
        fsdp, model: sections of the keys to turn; None: those of the stage's model in reinforcement learning.
    """
    pool = "" if report.pool == "policy" else f" of the {report.pool}'s workers"
    findings.facts.setdefault("memory", {})[report.pool] = {
        "device": device,
        "total_bytes": report.total_bytes,
        "beside_bytes": report.beside_bytes,
        "stages": {
            stage.name: {
                "bytes": stage.bytes,
                "needed_bytes": report.needed(stage),
                "held": dict(stage.held),
                "taken": dict(stage.taken),
                "key": stage.key,
                "note": stage.note,
            }
            for stage in report.stages
        },
    }
    for stage in report.stages:
        needed = report.needed(stage)
        text = f"{stage.name}{pool}: {needed / GIB:.1f} GiB ({_parts(stage)})"
        if report.total_bytes is None or needed <= report.total_bytes:
            findings.note(_AREA, f"{text}{f'; {stage.note}' if stage.note else ''}.", stage.key.partition("=")[0])
            continue
        findings.error(
            _AREA,
            f"{text} do not fit into the {report.total_bytes / GIB:.1f} GiB of {device}. {_advice(stage, fsdp, model)}",
            stage.key.partition("=")[0],
        )


def _parts(stage: StageMemory) -> str:
    parts = {**stage.held, **stage.taken}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size > 0.05 * GIB) or "next to nothing"


def _advice(stage: StageMemory, fsdp: str | None, model: str | None) -> str:
    """What to turn: what a stage takes first, then what lies there anyway."""
    held, taken = sum(stage.held.values()), sum(stage.taken.values())
    role = stage.name.removeprefix("update_") if stage.name.startswith("update_") else "actor"
    fsdp = fsdp or ("critic.model.fsdp_config" if role == "critic" else "actor_rollout_ref.actor.fsdp_config")
    model = model or ("critic.model" if role == "critic" else "actor_rollout_ref.model")
    state = (
        f"Keep state on the CPU ({fsdp}.optimizer_offload=true, {fsdp}.param_offload=true), train adapters "
        f"({model}.lora_rank=32), or use more GPUs."
    )
    return f"Lower {stage.key}. {state}" if taken > held / 4 else state
