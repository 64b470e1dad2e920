"""What a program in the sandbox may use, and what became of it."""

from dataclasses import dataclass
from typing import Literal

from burnish.config.reward import RewardConfig

Kind = Literal["ok", "error", "timeout", "memory", "output", "refused"]

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Limits of one run, and where it happens.

    Attributes:
        timeout: seconds that the program may take, by the clock and of processor time.
        memory_limit_mb: MiB that it may have, all its processes together.
        max_processes: processes and threads.
        disk_limit_mb: MiB of files, which are gone when it ends.
        output_limit_kb: KiB of each of stdout and stderr.
        allow_unsafe: run it where the kernel allows no namespaces too, with the limits but with a view of the files.
        fusion_url: address of a SandboxFusion server that runs programs instead of this machine; None: this machine.
        fusion_concurrency: requests under way at once, from this machine.
        fusion_memory_limit_mb: MiB that a program may have there.
    """

    timeout: float = 10.0
    memory_limit_mb: int = 1024
    max_processes: int = 32
    disk_limit_mb: int = 64
    output_limit_kb: int = 1024
    allow_unsafe: bool = False
    fusion_url: str | None = None
    fusion_concurrency: int = 64
    fusion_memory_limit_mb: int = 1024


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """What became of a program.

    Attributes:
        stdout: what it printed, cut at the limit; bytes that are no UTF-8 are replaced.
        stderr: likewise.
        exit_code: its exit status; negative: the signal that ended it; None where it did not end by itself.
        kind: "ok" (exit status 0), "error" (another), "timeout", "memory", "output" (it printed more than allowed),
            "refused" (it was not run; stderr says why).
        seconds: how long it took.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    kind: Kind
    seconds: float


def sandbox_settings(config: RewardConfig) -> SandboxSettings:
    """The limits in the section ``reward``."""
    sandbox, fusion = config.sandbox, config.sandbox_fusion
    return SandboxSettings(
        timeout=sandbox.timeout,
        memory_limit_mb=sandbox.memory_limit_mb,
        max_processes=sandbox.max_processes,
        disk_limit_mb=sandbox.disk_limit_mb,
        output_limit_kb=sandbox.output_limit_kb,
        allow_unsafe=sandbox.allow_unsafe,
        fusion_url=fusion.url,
        fusion_concurrency=fusion.max_concurrent,
        fusion_memory_limit_mb=fusion.memory_limit_mb,
    )
