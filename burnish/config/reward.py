"""`reward`: from responses to scores."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config.reward_model import RewardModelConfig
from burnish.config.reward_services import JudgeConfig, RateLimitConfig, RemoteRewardConfig
from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class RewardManagerModuleConfig(Section):
    """The file of your own reward manager."""

    path: str | None = key(None, is_path=True)
    """Python file, or `pkg://package.module`, that defines the class `reward.reward_manager.name`."""


@dataclass(kw_only=True, slots=True)
class RewardManagerConfig(Section):
    """Who calls the reward function."""

    name: str = key("naive")
    """`naive` calls it for each response, and `gdpo` is another name of it; `dapo` also reports the score as `acc`, before
    any punishment of length; `prime` is `naive` that always uses processes; `batch` calls it once for all responses;
    `rate_limited` keeps to `reward.rate_limit`; `remote` asks a server (`reward.remote`). Your own is named as
    package.module:attribute, or lies in the file `reward.reward_manager.module.path`."""
    source: str = key("register", choices=("register", "importlib"))
    """`importlib`: `name` is a class of the file `reward.reward_manager.module.path`."""
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig)
    """The file of your own reward manager."""


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig(Section):
    """A reward function of your own."""

    path: str | None = key(None, is_path=True)
    """Python file that defines it; null: the built-in function that `data.reward_fn_key` chooses."""
    name: str = key("compute_score")
    """Its name in that file."""
    reward_kwargs: dict[str, Any] = key({})
    """Further arguments it is called with."""


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig(Section):
    """DAPO's soft punishment of responses that come near the length limit (arXiv:2503.14476)."""

    enable: bool = key(False)
    """Add min(-(length - (max_resp_len - len)) / len * penalty_factor, 0) to the score."""
    len: int = key(512, ge=1)
    """Tokens before the limit over which the penalty grows."""
    penalty_factor: float = key(1.0, ge=0)
    """The penalty at the limit."""
    log: bool = key(False)
    """Log the penalty and the share of responses that got one."""


@dataclass(kw_only=True, slots=True)
class RewardKwargsConfig(Section):
    """Arguments of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)
    """Punishment of long responses."""
    max_resp_len: int = key(None, follows="data.max_response_length", ge=1)
    """The length limit that it counts from."""
    custom: dict[str, Any] = key({})
    """Keys of your own manager (`reward.reward_kwargs.custom.alpha=0.3`); it reads them as
    `config.reward_kwargs.custom["alpha"]`."""


@dataclass(kw_only=True, slots=True)
class SandboxConfig(Section):
    """Where code of the policy is run: processes of this machine that see and reach nothing of it (docs/sandbox.md)."""

    timeout: float = key(10.0, gt=0, le=3600)
    """Seconds for each test of a program, by the clock and of processor time."""
    memory_limit_mb: int = key(1024, ge=64)
    """MiB for a program, all its processes together."""
    max_processes: int = key(32, ge=4)
    """Processes and threads of a program."""
    disk_limit_mb: int = key(64, ge=1)
    """MiB of files that a program may write; they are gone when it ends."""
    output_limit_kb: int = key(1024, ge=1)
    """KiB that a program may print in a test."""
    allow_unsafe: bool = key(False)
    """Where the kernel allows no namespaces: run programs all the same, with the limits, but with a view of the files."""


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig(Section):
    """A SandboxFusion server that runs code of the policy instead of this machine."""

    url: str | None = key(None)
    """Its address, as `http://sandbox:8080/run_code`; null: this machine, see `reward.sandbox`."""
    max_concurrent: int = key(64, ge=1)
    """Requests under way at once, from each machine."""
    memory_limit_mb: int = key(1024, ge=1)
    """MiB for a program there."""


@dataclass(kw_only=True, slots=True)
class RewardConfig(Section):
    """Rewards."""

    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    """Who calls the reward function."""
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    """Arguments of the reward manager."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    """A reward function of your own."""
    reward_model: RewardModelConfig = section(RewardModelConfig)
    """A model that scores responses."""
    judge: JudgeConfig = section(JudgeConfig)
    """A language model that scores responses."""
    remote: RemoteRewardConfig = section(RemoteRewardConfig)
    """A server that scores responses."""
    rate_limit: RateLimitConfig = section(RateLimitConfig)
    """How often the reward function is called."""
    sandbox: SandboxConfig = section(SandboxConfig)
    """Where code of the policy is run."""
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    """A SandboxFusion server that runs it instead."""
    functions: dict[str, Any] = key({})
    """Several reward functions, each under a name of yours: `functions.<name>.path`, `.name` (compute_score), `.weight` (1.0)
    and `.reward_kwargs`; the score is the sum of weight x score, and each is logged."""
    num_workers: int | str = key("auto", choices=("auto",), ge=0)
    """Processes that call the reward function, on every node that samples; 0: it is called where the rest runs, without time
    limits. auto: 0 for those built-in functions that cannot hang, else one for each CPU, up to 8."""
    timeout: float | None = key(60.0, gt=0)
    """Seconds that the reward of one response may take; then its process is ended with all that it started. null: any time."""
    memory_limit_mb: int | None = key(None, ge=64)
    """Memory that a reward process may use, in MiB."""
    launch_reward_fn_async: bool = key(True)
    """Score each response as soon as it is finished, in processes beside the workers that sample, while others are still being
    sampled. It takes a reward manager that scores each response by itself and `num_workers` other than 0."""
    on_error: str = key("abstain", choices=("abstain", "raise", "zero"))
    """A response whose reward function raises, takes too long, dies, or returns no number that is finite: `abstain` counts
    it, leaves it out of training and goes on unless all of a batch failed; `zero` counts it and scores it 0; `raise` stops
    the run."""
