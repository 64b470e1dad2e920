"""The GRPO benchmark's figures for people."""

from typing import Any


def table(result: dict[str, Any]) -> str:
    """One model and variant, for people."""

    def seconds(name: str) -> str:
        return f"{result[name]:8.3f} ({result[f'{name}_min']:.3f}, {result[f'{name}_max']:.3f})"

    def stages(name: str) -> str:
        return ", ".join(f"{stage} {value:.3f}" for stage, value in result[name].items())

    lines = [
        f"{result['model']}, {result['variant']} ({result['dtype']}), engine {result['engine']}, {result['gpus']} rank(s): "
        f"{result['work']}",
        f"  burnish, seconds a step     {seconds('seconds')}, of CPU {result['cpu_seconds']:.2f}: {stages('stages')}",
    ]
    if "peer" in result:
        told = result["cpu_ratio"] is not None
        cpu, cpu_ratio = (
            (f", of CPU {result['peer_cpu_seconds']:.2f}", f", in seconds of CPU {result['cpu_ratio']:.2f}")
            if told
            else ("", "")
        )
        lines.append(
            f"  {result['peer']} ({result['peer_dtype']}), seconds      {seconds('peer_seconds')}{cpu}, "
            f"{result['peer_repeats']} steps: {stages('peer_stages')}"
        )
        lines.append(f"  {result['peer']} over burnish            {result['ratio']:8.2f}{cpu_ratio}")
    if result["memory_gib"] is not None:
        peer_memory = result.get("peer_memory_gib")
        beside = "" if peer_memory is None else f"; peer {peer_memory:.2f}"
        lines.append(f"  memory peak, GiB            {result['memory_gib']:8.2f}{beside}")
    lines.append(f"  load of the machine         {result['load_before']:8.1f} to {result['load_after']:.1f}")
    return "\n".join(lines)
