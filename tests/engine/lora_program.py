"""Small engines that train adapters, and a program that trains them on several ranks (run as `engine_program`)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import FSDPEngine
from burnish.model import lora
from burnish.model.load import build_causal_lm
from burnish.utils.fingerprint import Fingerprints
from tests.engine.engine_program import main, make_batch, my_share, policy_loss, tiny_config, value_loss

PROGRAM = Path(__file__)


def make_lora_engine(
    *,
    dtype: str = "float32",
    module: str = "policy",
    fsdp_size: int = -1,
    seed: int = 0,
    path: str | None = None,
    trained: bool = True,
    optim: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **keys: Any,
) -> FSDPEngine:
    """An engine whose adapters are trained on a random tiny model, or on the one at ``path``."""
    model = None
    if path is None:
        model = build_causal_lm(tiny_config(), torch.float64 if dtype == "float64" else torch.float32)
        model = model.model if module == "value" else model
    return FSDPEngine(
        HFModelConfig(path=path, **({"lora_rank": 3, "lora_alpha": 6, "lora_seed": seed} | keys)),
        FSDPEngineConfig(dtype=dtype, fsdp_size=fsdp_size, **(engine or {})),
        FSDPOptimizerConfig(**({"lr": 1e-2, "clip_grad": 1.0} | (optim or {}))) if trained else None,
        module=module,  # type: ignore[arg-type]
        total_training_steps=10,
        model=model,
    )


def gradients(engine: FSDPEngine, step: int, micro_batch_size: int = 3, uneven: bool = False) -> dict[str, Tensor]:
    """Adds the gradient of batch ``step`` and returns it."""
    dtype = torch.float64 if engine.dtype == torch.float64 else torch.float32
    rows, is_policy = my_share(make_batch(seed=step, dtype=dtype), engine, uneven), engine.kind == "policy"
    engine.train_batch(
        rows,
        policy_loss() if is_policy else value_loss,
        outputs=("log_probs", "entropy") if is_policy else ("values",),
        micro_batch_size=micro_batch_size,
        global_batch_info=engine.global_batch_info(rows),
    )
    return {name: gradient.cpu() for name, gradient in engine.full_gradients().items()}


def train(engine: FSDPEngine, first: int, last: int, **how: Any) -> list[dict[str, Tensor]]:
    """The gradient of each step from ``first`` to ``last``, each followed by its update."""
    result = []
    for step in range(first, last + 1):
        result.append(gradients(engine, step, **how))
        engine.optimizer_step(step)
    return result


def base_fingerprints(engine: FSDPEngine) -> dict[str, int]:
    """Of everything that is not trained."""
    found = Fingerprints()
    for name, tensor in engine.named_weights():
        if not lora.is_adapter_name(name) and not name.startswith("value_head."):
            found.add(name, tensor)
    return found.read()


def log_probs(engine: FSDPEngine) -> Tensor:
    """Of one batch."""
    output = "values" if engine.kind == "value" else "log_probs"
    return engine.infer_batch(make_batch(), micro_batch_size=3, outputs=(output,))[output]


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Trains, saves in the middle, exports, and goes on."""
    case = dict(case)
    name, uneven = case.pop("name"), case.pop("uneven", False)
    engine = make_lora_engine(**case)
    before, at_start = base_fingerprints(engine), log_probs(engine)
    result: dict[str, Any] = {"gradients": train(engine, 1, 3, uneven=uneven), "start": at_start}
    engine.save_checkpoint(out / name)
    engine.export_merged(out / f"{name}_merged")
    result["log_probs"] = log_probs(engine)
    with engine.adapters_off():
        result["reference"] = log_probs(engine)
    result["later"] = train(engine, 4, 5, uneven=uneven)
    result["weights"] = {name: weight.cpu().clone() for name, weight in engine.named_weights()}
    result["base_stays"] = base_fingerprints(engine) == before
    resumed = make_lora_engine(**(case | {"seed": 9}))
    resumed.load_checkpoint(out / name)
    again = train(resumed, 4, 5, uneven=uneven)
    result["resumed"] = all(
        torch.equal(a[name], b[name]) for a, b in zip(result["later"], again, strict=True) for name in a
    ) and all(torch.equal(weight.cpu(), result["weights"][name]) for name, weight in resumed.named_weights())
    result["only_adapters"] = [name for name, _ in engine.named_weights(adapters_only=True)]
    return result


if __name__ == "__main__":
    main(run_case)
