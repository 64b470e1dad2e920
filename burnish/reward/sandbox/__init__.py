"""Runs code that a policy wrote: on this machine, shut off from it, or on a SandboxFusion server (docs/sandbox.md)."""

from burnish.reward.sandbox import fusion, local
from burnish.reward.sandbox.limits import SandboxResult, SandboxSettings, sandbox_settings
from burnish.utils.errors import ConfigError

__all__ = ["SandboxResult", "SandboxSettings", "capability", "check", "run", "sandbox_settings"]


def run(code: str, *, stdin: str = "", settings: SandboxSettings | None = None) -> SandboxResult:
    """Runs a Python program with ``stdin`` as its input.

    Raises:
        RewardError: the SandboxFusion server cannot be reached or does not answer as it should.
    """
    settings = settings or SandboxSettings()
    return (fusion if settings.fusion_url else local).run(code, stdin=stdin, settings=settings)


def check(settings: SandboxSettings) -> None:
    """Nothing where programs can be run as ``settings`` say. A server is not asked.

    Raises:
        ConfigError: this machine allows no sandbox; says why and what can be done.
    """
    if settings.fusion_url or settings.allow_unsafe:
        return
    why = local.refusal()
    if why is not None:
        raise ConfigError(
            f"Code of the policy cannot be run here without risk. {why} Allow user namespaces (a container needs "
            f"--security-opt seccomp=unconfined, or --cap-add SYS_ADMIN), name a server in reward.sandbox_fusion.url, "
            f"or set reward.sandbox.allow_unsafe=true where the machine holds nothing that matters."
        )


def capability() -> str:
    """In a few words, what this machine offers; tries it."""
    why = local.refusal()
    return "namespaces: code of the policy is shut off from this machine" if why is None else f"none. {why}"
