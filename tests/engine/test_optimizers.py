"""Optimizers by name: each is the one of its library, its state survives a checkpoint, and what cannot work is refused."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config import FSDPOptimizerConfig, load_config
from burnish.config.names import IMPOSSIBLE_OPTIMIZERS, OPTIMIZERS, OPTIMIZERS_WITHOUT_BETAS
from burnish.engine.optimizers import build_optimizer
from burnish.utils.errors import CheckpointError, ConfigError
from tests.engine.engine_program import make_batch, make_engine, policy_loss, run_ranks, train

# Matrices of 4,096 elements and more are quantised, also when two ranks share them.
WIDE = {"hidden_size": 128, "intermediate_size": 96}
QUANTIZED = {
    "torchao.optim": ["AdamW8bit", "AdamW4bit", "AdamWFp8"],
    "bitsandbytes.optim": ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"],
}
CASES = [(library, name) for library, names in QUANTIZED.items() for name in names]


def quantized(library: str, name: str, **more: Any) -> dict[str, Any]:
    pytest.importorskip(library.partition(".")[0])
    return {"optimizer_impl": library, "optimizer": name, "config": WIDE, "lr": 1e-3} | more


@pytest.fixture(autouse=True)
def _without_what_libraries_say() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def engine_state(engine: Any) -> list[Tensor]:
    return [x for name in engine._optimizer._parameters for x in engine._optimizer.state_tensors(name)]


@pytest.mark.parametrize("library", OPTIMIZERS)
def test_the_names_in_the_configuration_exist_and_take_the_keys_they_are_given(library: str) -> None:
    module = pytest.importorskip(library)
    for name in OPTIMIZERS[library]:
        takes = inspect.signature(getattr(module, name)).parameters
        assert {"lr", "weight_decay"} <= set(takes)
        assert ("betas" in takes) == (name not in OPTIMIZERS_WITHOUT_BETAS), name


@pytest.mark.parametrize("name", OPTIMIZERS["torch.optim"])
def test_steps_are_those_of_torch_on_the_same_gradient(name: str) -> None:
    extra = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5, "centered": True}}.get(name, {"eps": 1e-6})
    how = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1e9}
    engine = make_engine(dtype="float64", optimizer=name, override_optimizer_config=extra, **how)
    twin = make_engine(dtype="float64", **how)
    parameters = dict(twin.module.named_parameters())
    betas = {} if name in OPTIMIZERS_WITHOUT_BETAS else {"betas": (0.9, 0.999)}
    plain = getattr(torch.optim, name)(parameters.values(), lr=1e-2, weight_decay=0.1, **betas, **extra)
    start = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    for number in (1, 2, 3):
        for each in (engine, twin):
            each.train_batch(
                make_batch(seed=number, dtype=torch.float64), policy_loss(), outputs=("log_probs", "entropy")
            )
        engine.optimizer_step(number)
        plain.step()
        plain.zero_grad()
    for key, parameter in engine.module.named_parameters():
        torch.testing.assert_close(parameter, parameters[key], atol=1e-9, rtol=0)
        assert not torch.equal(parameter, start[key])


@pytest.mark.parametrize(("library", "name"), CASES)
def test_quantised_states_are_small_and_steps_stay_near_those_of_the_whole_ones(library: str, name: str) -> None:
    case = quantized(library, name)
    whole = {"Lion8bit": "Lion"}.get(name, "AdamW")
    plain = {"optimizer": whole, "optimizer_impl": "bitsandbytes.optim" if whole == "Lion" else "torch.optim"}
    engines = [make_engine(**case), make_engine(**(case | plain))]
    start = {key: weight.clone() for key, weight in engines[0].named_weights()}
    small, large = (train(engine, steps=4, micro_batch_size=4)["weights"] for engine in engines)
    moved = sum(float((large[key] - start[key]).square().sum()) for key in start) ** 0.5
    apart = sum(float((large[key] - small[key]).square().sum()) for key in start) ** 0.5
    # Four bits have sixteen steps; the others move the weights alike to a few hundredths.
    assert 0 < apart < (0.35 if "4bit" in name else 0.1) * moved
    small_bytes, large_bytes = (sum(x.nbytes for x in engine_state(engine)) for engine in engines)
    # Tables of 256 values a parameter weigh something in a model this small.
    assert small_bytes < 0.45 * large_bytes


@pytest.mark.parametrize(
    ("library", "name"), [*CASES, ("torch.optim", "SGD"), ("torch.optim", "Adagrad"), ("bitsandbytes.optim", "AdamW")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_to_the_bit_from_its_checkpoint(tmp_path: Path, library: str, name: str, dtype: str) -> None:
    momentum = {"override_optimizer_config": {"momentum": 0.9}} if name == "SGD" else {}
    case = quantized(library, name, dtype=dtype, **momentum)
    engine = make_engine(**case)
    train(engine, steps=2, micro_batch_size=4)
    assert engine.non_finite_weights() == []
    engine.save_checkpoint(tmp_path)
    resumed = make_engine(**case, seed=5)
    resumed.load_checkpoint(tmp_path)
    assert len(engine_state(engine)) > 0
    assert all(torch.equal(a, b) for a, b in zip(engine_state(engine), engine_state(resumed), strict=True))
    a, b = (train(each, steps=2, micro_batch_size=4) for each in (engine, resumed))
    assert a["updates"] == b["updates"]
    assert all(torch.equal(weight, b["weights"][key]) for key, weight in a["weights"].items())


@pytest.mark.parametrize(("library", "name"), CASES)
def test_a_quantised_state_that_is_not_finite_is_not_saved(tmp_path: Path, library: str, name: str) -> None:
    engine = make_engine(**quantized(library, name))
    train(engine, steps=1, micro_batch_size=4)
    wide = "model.model.layers.0.mlp.up_proj.weight"
    scale = next(x for x in engine._optimizer.state_tensors(wide) if x.is_floating_point() and x.numel() != 256)
    scale.view(-1)[0] = float("nan")
    assert engine.non_finite_weights() == [f"state of {wide}"]
    with pytest.raises(CheckpointError, match="was not written"):
        engine.save_checkpoint(tmp_path / "new")


@pytest.mark.parametrize(("first", "then"), [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_a_state_of_another_optimizer_is_refused(tmp_path: Path, first: str, then: str) -> None:
    engine = make_engine(optimizer=first)
    train(engine, steps=1, micro_batch_size=4)
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"is of torch\.optim\..*{first}, and this run trains with .*{then}"):
        make_engine(optimizer=then).load_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """Two ranks that share a model train, save and go on; two others go on from what they saved."""
    out = tmp_path_factory.mktemp("two_ranks")
    shared = {"steps": 2, "micro_batch_size": 2}
    cases = [quantized(*case) | shared | {"name": case[0], "save": case[0]} for case in (CASES[0], CASES[3])]
    first = run_ranks(out, cases)
    resumed = [case | {"load": str(out / case["name"])} for case in cases]
    for case in resumed:
        case.pop("save")
    return out, first, run_ranks(tmp_path_factory.mktemp("resumed"), resumed)


@pytest.mark.parametrize("library", QUANTIZED)
def test_ranks_that_share_a_model_go_on_to_the_bit(library: str, two_ranks: Any) -> None:
    _, first, resumed = two_ranks
    for rank in range(2):
        expected = first[rank][library]["after_save"]
        assert resumed[rank][library]["updates"] == expected["updates"]
        assert all(torch.equal(resumed[rank][library]["weights"][key], w) for key, w in expected["weights"].items())


@pytest.mark.parametrize(("library", "name"), [CASES[0], CASES[3]])
def test_blocks_of_two_ranks_cannot_be_cut_anew_for_one(library: str, name: str, two_ranks: Any) -> None:
    engine = make_engine(**quantized(library, name))
    with pytest.raises(
        CheckpointError, match="saved in 2 parts, one for each rank that shared the model, and here 1 share"
    ):
        engine.load_checkpoint(two_ranks[0] / library)
    engine.load_checkpoint(two_ranks[0] / library, ("model",))


def test_an_argument_that_the_optimizer_does_not_take_is_named_with_those_it_takes() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    config = FSDPOptimizerConfig(override_optimizer_config={"epss": 1e-6})
    with pytest.raises(
        ConfigError, match=r"epss=1e-06: AdamW takes no such argument\. Did you mean eps\? It takes: eps, ams"
    ):
        build_optimizer([parameter], config)


def test_arguments_reach_the_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    config = FSDPOptimizerConfig(override_optimizer_config={"eps": 1e-3}, betas=[0.5, 0.6], weight_decay=0.7)
    (group,) = build_optimizer([parameter], config).param_groups
    assert (group["eps"], group["betas"], group["weight_decay"], group["fused"]) == (1e-3, (0.5, 0.6), 0.7, True)
    assert build_optimizer([parameter], FSDPOptimizerConfig(override_optimizer_config={"foreach": True})).param_groups


class Halving(torch.optim.SGD):
    """An optimizer of a user's own."""


def test_an_own_optimizer_is_named_by_its_module() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    for config in (
        FSDPOptimizerConfig(optimizer=f"{__name__}:Halving"),
        FSDPOptimizerConfig(optimizer="Halving", optimizer_impl=__name__),
    ):
        assert type(build_optimizer([parameter], config)) is Halving
    with pytest.raises(ConfigError, match=r"has no such optimizer\. Did you mean Halving\?"):
        build_optimizer([parameter], FSDPOptimizerConfig(optimizer=f"{__name__}:Halvin"))
    with pytest.raises(ConfigError, match=r"cannot be imported .*Did you mean torch\.optim\?"):
        build_optimizer([parameter], FSDPOptimizerConfig(optimizer_impl="torch.optm"))


OPTIM = "actor_rollout_ref.actor.optim"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["optimizer=AdamWw"], r"torch\.optim has no such optimizer\. Did you mean AdamW\?"),
        (["optimizer=AdamW8bit"], r"It is one of .*optimizer_impl=torchao\.optim"),
        (["optimizer=Muon"], "is refused: it needs whole matrices"),
        (["optimizer_impl=torcho.optim"], r"torcho is not installed\. Did you mean torchao\.optim\?"),
        (["override_optimizer_config={lr:1}"], r"lr is the key .*optim\.lr"),
        (["betas=[0.9]"], "must be two numbers"),
    ],
)
def test_the_configuration_refuses_what_cannot_work(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(["actor_rollout_ref.model.path=m", "data.train_files=t", *(f"{OPTIM}.{x}" for x in settings)])


def test_a_library_that_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"torchao is not installed\. Install it: `pip install 'burnish\[optimizers\]'`"
    ):
        load_config(["actor_rollout_ref.model.path=m", "data.train_files=t", f"{OPTIM}.optimizer_impl=torchao.optim"])


def test_every_optimizer_that_cannot_work_is_one_of_torch() -> None:
    assert not set(IMPOSSIBLE_OPTIMIZERS) & set(OPTIMIZERS["torch.optim"])
    assert {name for name in IMPOSSIBLE_OPTIMIZERS if not hasattr(torch.optim, name)} <= {"Muon"}
