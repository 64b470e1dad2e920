"""docs/algorithms.md names all that exists and nothing that does not, and its worked numbers are those of the code."""

import math
import re

import pytest
import torch
import yaml

from burnish.config import (
    AlgoConfig,
    FSDPActorConfig,
    FSDPOptimizerConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    load_config,
    names,
)
from burnish.config.build import value_of
from burnish.config.load import RECIPES
from burnish.config.rejection import PRESETS
from burnish.config.schema import leaves, sections
from burnish.conformance.batches import ragged_batch
from burnish.conformance.own import own_algorithms
from burnish.conformance.suite import run_checks
from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.aggregation import LOSS_AGG_MODES, agg_loss
from burnish.core_algos.estimators import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from burnish.core_algos.kl import KL_PENALTIES, AdaptiveKLController, kl_penalty
from burnish.core_algos.policy_losses import get_policy_loss_fn
from burnish.core_algos.resampling import compute_pf_ppo_reweight_data
from burnish.core_algos.reward_shaping import overlong_penalty
from burnish.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from burnish.core_algos.scans import generalized_advantage
from burnish.core_algos.value_loss import compute_value_loss
from burnish.engine.schedule import lr_at
from burnish.protocol import DataProto
from tests.conftest import REPO

DOC = (REPO / "docs" / "algorithms.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^#+ (.*)$", DOC, re.MULTILINE)
SHORT = {"actor": "actor_rollout_ref.actor", "rollout": "actor_rollout_ref.rollout"}
RECIPE_NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml") if file.stem != "ppo_trainer")


def section(title: str, within: str = DOC) -> str:
    """The text under the first heading that has ``title`` among its names, up to the next heading of its rank or higher."""
    for match in re.finditer(r"^(#+) (.*)$", within, re.MULTILINE):
        if title in match[2].split(", "):
            rest = within[match.end() :]
            after = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
            return rest[: after.start()] if after else rest
    raise AssertionError(f"There is no heading {title!r}.")


def first_column(text: str) -> set[str]:
    """Names in backticks in the first column of the tables of ``text``."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def row(text: str, first: str) -> list[str]:
    """The other cells of the table row that begins with ``first``, as they are or in backticks."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and first in (cells[0], *re.findall(r"`([^`]+)`", cells[0])):
            return cells[1:]
    raise AssertionError(f"There is no row {first!r}.")


def written(number: float) -> str:
    """A number as the page writes it: four digits, and no zero before the point."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{number:.4g}")


def wide(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# What there is, is on the page.


@pytest.mark.parametrize("name", [name for name in names.ADV_ESTIMATORS if not name.endswith("_vectorized")])
def test_every_estimator_has_a_section_with_its_use_and_its_keys(name):
    text = section(name, section("Advantage estimators"))
    assert "- Use it " in text
    assert re.search(r"Keys: ", text)


@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_every_loss_has_a_section_with_its_use(name):
    assert "- Use it " in section(name, section("Policy losses"))


@pytest.mark.parametrize(
    ("title", "wanted"),
    [
        ("Advantage estimators", names.ADV_ESTIMATORS),
        ("Policy losses", names.POLICY_LOSSES),
        ("Aggregation", LOSS_AGG_MODES),
        ("KL to the reference", KL_PENALTIES),
        ("Presets", PRESETS),
        ("Recipes", RECIPE_NAMES),
    ],
)
def test_every_name_that_a_key_may_take_has_a_row(title, wanted):
    assert set(wanted) - first_column(section(title)) == set()


def keys_in(text: str) -> set[str]:
    """Dotted names in backticks that start like a key, with their short forms written out."""
    roots = {path.split(".")[0] for path in sections()} | set(SHORT)
    found = set()
    for quoted in re.findall(r"`([^`\n]+)`", text):
        for word in re.findall(r"(?<![\w/.])[a-z_]+(?:\.[a-z_0-9]+)+(?:\.\*)?", quoted):
            root, _, rest = word.partition(".")
            if root in roots:
                found.add(f"{SHORT.get(root, root)}.{rest}")
    return found


def test_every_key_on_the_page_exists():
    keys = keys_in(DOC)
    assert len(keys) > 50
    unknown = {key for key in keys if key.removesuffix(".*") not in sections() and key not in leaves()}
    assert unknown == set()


def test_every_key_of_an_algorithm_is_on_the_page():
    prefixes = ("algorithm.", "actor_rollout_ref.actor.policy_loss.", "reward.reward_kwargs.overlong_buffer_cfg.")
    wanted = {key for key in leaves() if key.startswith(prefixes)}
    last_words = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`\n]+)`", DOC))))
    assert {key for key in wanted if key.rpartition(".")[2] not in last_words} == set()


def test_every_link_leads_somewhere():
    anchors: list[str] = []
    for heading in HEADINGS:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{anchors.count(anchor)}" if anchor in anchors else anchor)
    links = set(re.findall(r"\]\(#([^)]+)\)", DOC))
    assert len(links) > 30
    assert links - set(anchors) == set()
    files = re.findall(r"\]\(([\w/.]+\.md)\)", DOC)
    assert files
    assert all((REPO / "docs" / file).exists() for file in files)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_row_of_a_recipe_names_its_estimator_its_loss_and_its_paper(name):
    config, what, paper = load_config([f"recipe={name}"]), *row(section("Recipes"), name)
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    wanted = {algorithm.adv_estimator, algorithm.rollout_correction.preset or loss} - {"vanilla"}
    assert wanted - set(re.findall(r"`([^`]+)`", what)) == set()
    comment = (RECIPES / f"{name}.yaml").read_text().splitlines()[0]
    assert paper == (re.findall(r"arXiv:(\d{4}\.\d{5})", comment) or [""])[0]


@pytest.mark.parametrize("name", PRESETS)
def test_the_row_of_a_preset_says_what_it_sets(name):
    correction = load_config([f"algorithm.rollout_correction.preset={name}"]).algorithm.rollout_correction
    mode = f"bypass, {correction.loss_type}" if correction.bypass_mode else "decoupled"
    bounds = str(correction.rollout_rs_threshold or "")
    assert row(section("Presets"), name) == [mode, correction.rollout_is or "", correction.rollout_rs or "", bounds]


# Metrics.


def config_of(name: str, **correction) -> FSDPActorConfig:
    policy_loss = PolicyLossConfig(loss_mode=name, rollout_correction=RolloutCorrectionConfig(**correction))
    return FSDPActorConfig(policy_loss=policy_loss)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_every_metric_of_a_loss_is_in_its_section(name, loss_type):
    b = ragged_batch(0)
    config = config_of(
        name, rollout_is="token", loss_type=loss_type, rollout_rs="token_k2", rollout_rs_threshold="0.05"
    )
    _, metrics = get_policy_loss_fn(name)(b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean", config)
    losses = section("Policy losses")
    known = losses.split("\n### ")[0] + section(name, losses)
    if name == "bypass_mode":
        # Its table marks them by (b).
        marked = "".join(
            line
            for line in section("Metrics of rollout correction").splitlines()
            if line.startswith("|") and "(b)" in line
        )
        corrected = {metric for metric in metrics if metric.startswith("rollout_corr/")}
        assert {metric for metric in corrected if f"`{metric}` (b)" not in marked} == set()
        known += marked
    assert [metric for metric in metrics if f"`{metric}`" not in known] == []


def test_the_metrics_of_rollout_correction_are_those_of_the_table():
    b = ragged_batch(0)
    rules = "token_k2,seq_mean_k1,seq_max_k1"
    config = RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs=rules,
        rollout_rs_threshold="1,0.5_2.0,0.1_10",
    )
    _, _, metrics = compute_rollout_correction_and_rejection_mask(b.old_log_probs, b.log_probs, b.mask, config)
    made = set(metrics)
    for rule in rules.split(","):
        made = {re.sub(rf"rollout_rs_{rule}_", "rollout_rs_NAME_", name) for name in made}
    assert first_column(section("Metrics of rollout correction")) == made


# Worked numbers.


def test_the_batch_under_every_estimator():
    lengths, scores = torch.tensor([2, 1, 4, 3]), wide([1.0, 0.0, 0.0, 0.5])[0]
    mask = torch.arange(4)[None, :] < lengths[:, None]
    rewards = torch.zeros(4, 4, dtype=torch.float64)
    rewards[torch.arange(4), lengths - 1] = scores
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": torch.zeros_like(rewards),
        "old_log_probs": torch.full_like(rewards, math.log(0.5)),
        "sum_pi_squared": torch.full_like(rewards, 0.5),
        "reward_baselines": torch.full_like(scores, 0.25),
        "reward_components": scores[:, None],
    }
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": ["a"] * 4})
    text = section("Advantage estimators")
    table = text[text.index("**One batch") : text.index("### gae")]
    for name in names.ADV_ESTIMATORS:
        if not name.endswith("_vectorized"):
            data = compute_advantage(batch.select(), name, num_repeat=4, config=AlgoConfig())
            assert row(table, name) == [written(a) for a in data.tensors["advantages"][:, 0].tolist()], name
    data = compute_advantage(batch.select(), "grpo", num_repeat=4, norm_adv_by_std_in_grpo=False)
    without = row(table, "grpo, `norm_adv_by_std_in_grpo=false`")
    assert without == [written(a) for a in data.tensors["advantages"][:, 0].tolist()]


def test_the_token_under_every_loss():
    text = section("Policy losses")
    table = text[text.index("**One token") : text.index("### vanilla")]
    for name in names.POLICY_LOSSES:
        numbers = []
        for advantage in (0.5, -0.5):
            log_prob = wide([-1.5]).requires_grad_()
            loss, _ = get_policy_loss_fn(name)(
                wide([-2.0]), log_prob, wide([advantage]), torch.ones(1, 1), "token-mean", config_of(name)
            )
            loss.backward()
            numbers += [loss.item(), log_prob.grad.item()]
        assert row(table, name) == [written(number) for number in numbers], name


def test_the_examples_of_estimators():
    text = section("gae")
    rewards, values, mask = wide([0, 0, 0, 1]), wide([0.2, 0.3, 0.4, 0.5]), torch.tensor([[0, 0, 1, 1]])
    raw = generalized_advantage(rewards, values, mask.bool(), 0.99, 0.95)[0, 2:].tolist()
    returns = compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)[1][0, 2:].tolist()
    assert raw == pytest.approx([0.56525, 0.5])
    assert returns == pytest.approx([0.96525, 1.0])
    assert "A = [-, -, .56525, .5]" in text
    assert "[-, -, .96525, 1]" in text

    rewards, mask = wide([0, 9, 1], [0.5, 0, 0]), torch.tensor([[1, 0, 1], [1, 0, 0]])
    returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)[1]
    assert returns.tolist() == [[0.5, 0.0, 1.0], [0.5, 0.0, 0.0]]
    assert "give returns [.5, 0, 1] and [.5, 0, 0]" in section("reinforce_plus_plus")

    scores = wide(*[[0.35]] * 7, [0.0])
    odd = compute_rloo_outcome_advantage(scores, torch.ones(8, 1), ["a"] * 8)[0][7].item()
    assert f"the odd one {written(odd)}" in section("rloo")


def test_the_example_of_aggregation():
    losses, mask = wide([1, 2], [3, 9]), torch.tensor([[1, 1], [1, 0]])
    for mode in LOSS_AGG_MODES:
        assert row(section("Aggregation"), mode)[-1] == written(
            agg_loss(losses, mask, mode, loss_scale_factor=4).item()
        )


def test_the_example_of_each_kl_estimator():
    for name in names.KL_PENALTIES:
        if not name.endswith("+"):
            value = kl_penalty(wide([0.5]), wide([0.0]), name).item()
            assert row(section("KL to the reference"), name)[1] == written(value), name
    controller = AdaptiveKLController(0.1, 0.5, 1000)
    controller.update(current_kl=0.55, n_steps=100)
    assert f"give {written(controller.value)}" in section("KL in the reward")


def test_the_example_of_the_value_loss():
    loss, _ = compute_value_loss(wide([1.0]), wide([2.0]), wide([0.0]), torch.ones(1, 1), 0.5)
    assert f"give {written(loss.item())}" in section("Value loss")


def test_the_example_of_overlong_shaping():
    penalties = overlong_penalty(torch.tensor([16, 18, 20]), 20, 4, 1.0).tolist()
    at = "{} at 16 tokens, {} at 18, {} at 20".format(*(written(penalty + 0.0) for penalty in penalties))
    assert at in section("Overlong shaping")


def test_the_example_of_pf_ppo():
    assert "have the shares .8, .2 and 0" in section("PF-PPO")
    scores = wide([1.0], [0.5], [0.0])
    data = DataProto.from_dict(
        tensors={"token_level_scores": scores, "loss_mask": torch.ones(3, 1, dtype=torch.bool), "row": torch.arange(3)}
    )
    big = DataProto.concat([data] * 4000)
    drawn = compute_pf_ppo_reweight_data(big, "pow", 2.0, torch.Generator().manual_seed(0)).tensors["row"]
    shares = (drawn.bincount(minlength=3) / len(drawn)).tolist()
    assert shares == pytest.approx([0.8, 0.2, 0.0], abs=0.01)
    assert shares[2] == 0.0


def test_the_schedule_is_the_one_on_the_page():
    text = section("Critic warm-up and schedules").replace("\n", " ")
    assert "lr step / W up to step W" in text
    warming = FSDPOptimizerConfig(lr=1.0, lr_warmup_steps=4)
    assert [lr_at(step, warming, 10) for step in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = FSDPOptimizerConfig(lr=1.0, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    # Progress 0 at step W + 1, 1/2 half-way through the eight steps that are left.
    assert [lr_at(3, cosine, 10), lr_at(7, cosine, 10)] == pytest.approx([1.0, 0.1 + 0.9 / 2])


def test_the_algorithms_of_the_examples_pass_all_checks_of_conformance(tmp_path, monkeypatch):
    examples = re.findall(r"```python\n(.*?)```", section("A new one"), re.DOTALL)
    (tmp_path / "examples_of_the_page.py").write_text("\n".join(examples))
    monkeypatch.syspath_prepend(tmp_path)
    own = own_algorithms("examples_of_the_page:centered", "examples_of_the_page:squared")
    assert [run_checks(algorithm).failures for algorithm in own] == [{}, {}]


@pytest.mark.parametrize(
    ("recipe", "keys", "said"),
    [
        ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, "the paper sets 3e-4 and 4e-4"),
        ("clip_cov", {"clip_ratio_low": 1, "clip_ratio_high": 1}, "1 each in the recipe"),
        ("kl_cov", {"policy_loss.kl_cov_ratio": 2e-3}, "2e-3 in the recipe"),
        ("kl_cov", {"policy_loss.ppo_kl_coef": 1}, "the recipe takes the paper's 1)"),
        ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, ".4 each in the paper and the recipe"),
        ("cispo", {"clip_ratio_low": 10}, "the recipe: 10"),
        ("dppo", {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15}, ".15 for tv in the recipe"),
        ("dppo", {"clip_ratio_c": 20}, "`actor.clip_ratio_c` = 20"),
    ],
)
def test_a_recipe_sets_what_the_page_says_of_it(recipe, keys, said):
    config = load_config([f"recipe={recipe}"])
    for key, value in keys.items():
        assert value_of(config, f"actor_rollout_ref.actor.{key}") == value
    losses = section("Policy losses")
    assert said in section("dppo_tv" if recipe == "dppo" else recipe, losses).replace("\n  ", " ")


def test_every_recipe_is_short_and_says_what_it_is():
    for name in RECIPE_NAMES:
        text = (RECIPES / f"{name}.yaml").read_text()
        assert text.startswith("# ")
        assert yaml.safe_load(text)
