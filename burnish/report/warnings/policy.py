"""Rules of `burnish.report.warnings` on how the policy moves and what it samples."""

import statistics
from collections.abc import Iterator

from burnish.report.rollouts import constant_groups
from burnish.report.warnings.base import RECENT, Evidence, Warning, recent_mean, rule, span


@rule
def clipping(evidence: Evidence) -> Iterator[Warning]:
    """Many tokens whose ratio is cut."""
    for name, limit in (("actor/pg_clipfrac", 0.2), ("critic/vf_clipfrac", 0.3)):
        share = recent_mean(evidence.series.points(name))
        if not share > limit:
            continue
        of_policy = name.startswith("actor")
        yield Warning(
            kind="clip_fraction",
            severity="warning",
            title="The updates are clipped a lot" if of_policy else "The critic's updates are clipped a lot",
            seen=f"{name} is {share:.0%} over the last {RECENT} steps; a few per cent are usual.",
            why="Clipped tokens teach nothing: one batch moves the policy further than its data vouch for."
            if of_policy
            else "Values move further in one step than the clip range allows, so they lag behind the returns.",
            tries=(
                "Halve actor_rollout_ref.actor.optim.lr.",
                "Make fewer updates from one batch: a larger actor_rollout_ref.actor.ppo_mini_batch_size, or "
                "actor_rollout_ref.actor.ppo_epochs=1.",
                "Let ratios rise further: actor_rollout_ref.actor.clip_ratio_high=0.28.",
            )
            if of_policy
            else ("Widen critic.cliprange_value.", "Halve critic.optim.lr."),
            metrics=(name,),
        )


@rule
def policy_kl(evidence: Evidence) -> Iterator[Warning]:
    """A policy that runs away within a step, or from its reference."""
    steps = [(step, value) for step, value in evidence.series.points("actor/ppo_kl") if abs(value) > 0.1]
    if steps:
        worst = max(steps, key=lambda point: abs(point[1]))
        yield Warning(
            kind="ppo_kl",
            severity="warning",
            title="The policy moves far within a step",
            seen=f"actor/ppo_kl is beyond 0.1 in {span([step for step, _ in steps])}, at most {worst[1]:.3g} in step {worst[0]}.",
            why="The later updates of a step then learn from responses of a policy that is no longer the one they train.",
            tries=(
                "Halve actor_rollout_ref.actor.optim.lr, or set actor_rollout_ref.actor.optim.lr_warmup_steps.",
                "Make fewer updates from one batch: a larger actor_rollout_ref.actor.ppo_mini_batch_size.",
                "Clip gradients earlier: actor_rollout_ref.actor.optim.clip_grad=0.5.",
            ),
            metrics=("actor/ppo_kl", "actor/grad_norm"),
            steps=tuple(step for step, _ in steps),
        )
    for name, key in (
        ("actor/kl_loss", "actor_rollout_ref.actor.kl_loss_coef"),
        ("actor/reward_kl_penalty", "algorithm.kl_ctrl.kl_coef"),
    ):
        now = recent_mean(evidence.series.points(name))
        if now > 0.5:
            yield Warning(
                kind="reference_kl",
                severity="warning",
                title="The policy is far from the reference",
                seen=f"{name} is {now:.3g} a token over the last {RECENT} steps.",
                why="That far away texts often lose their language before the score shows it. Read some responses.",
                tries=(
                    f"Raise {key}.",
                    "Stop earlier, or take an earlier checkpoint.",
                    "Halve actor_rollout_ref.actor.optim.lr.",
                ),
                metrics=(name, "critic/score/mean"),
            )


@rule
def entropy(evidence: Evidence) -> Iterator[Warning]:
    """Entropy that collapses or explodes."""
    points = evidence.series.points("actor/entropy")
    if len(points) < 10:
        return
    first, now = statistics.fmean(value for _, value in points[:5]), recent_mean(points, 5)
    if first > 0 and now < 0.1 * first and now < 0.1:
        score = [value for _, value in evidence.series.points("critic/score/mean")]
        learned = bool(score) and statistics.fmean(score[-5:]) > 0.95 * max(score) and max(score) > min(score)
        yield Warning(
            kind="entropy_collapse",
            severity="warning",
            title="Entropy has collapsed",
            seen=f"actor/entropy fell from {first:.3g} to {now:.3g} nats a token.",
            why="The policy gives nearly the same answer every time, so groups no longer vary and nothing new is found."
            + (" The score is at its best, so it may simply have learned what there is to learn." if learned else ""),
            tries=(
                "Let rare tokens gain: actor_rollout_ref.actor.clip_ratio_high=0.28.",
                "Reward entropy a little: actor_rollout_ref.actor.entropy_coeff=0.001.",
                "Sample with actor_rollout_ref.rollout.temperature=1.0, and halve actor_rollout_ref.actor.optim.lr.",
                "Leave out groups that all answer alike: algorithm.filter_groups.enable=true.",
            ),
            metrics=("actor/entropy", "critic/score/mean"),
        )
    if now > 3 * first and now > 1.0:
        yield Warning(
            kind="entropy_explosion",
            severity="bad",
            title="Entropy is exploding",
            seen=f"actor/entropy rose from {first:.3g} to {now:.3g} nats a token.",
            why="The policy is on its way to random text: the updates are too large, or the reward pays for noise.",
            tries=(
                "Halve actor_rollout_ref.actor.optim.lr and go on from an earlier checkpoint.",
                "Set actor_rollout_ref.actor.entropy_coeff=0 if it is more.",
                "Hold the policy near the reference: actor_rollout_ref.actor.use_kl_loss=true.",
            ),
            metrics=("actor/entropy", "critic/score/mean"),
        )


@rule
def groups_that_do_not_vary(evidence: Evidence) -> Iterator[Warning]:
    """Groups whose responses all have the same score: of advantage zero."""
    recent = list(constant_groups(evidence.train))[-RECENT:]
    total = sum(groups for _, _, groups in recent)
    constant = sum(count for _, count, _ in recent)
    if total < 8 or constant <= 0.5 * total:
        return
    scores = [row.score for step, *_ in recent for row in evidence.train[step] if row.score is not None]
    low, high = min(scores), max(scores)
    mean = statistics.fmean(scores)
    middle = "" if high == low else "hard" if mean < (low + high) / 2 else "easy"
    yield Warning(
        kind="zero_variance_groups",
        severity="bad" if constant > 0.9 * total else "warning",
        title="Most groups do not vary",
        seen=f"In {constant} of {total} dumped groups of the last {len(recent)} steps all responses have the same score "
        f"(mean score {mean:.3g}).",
        why="Their advantages are zero, so they cost time and teach nothing."
        + (f" The prompts are mostly too {middle} for the policy." if middle else ""),
        tries=(
            "Go on to further prompts until enough groups vary: algorithm.filter_groups.enable=true.",
            "Sample more responses to each prompt: actor_rollout_ref.rollout.n.",
            "Choose prompts of another difficulty, or a reward with more steps than right and wrong.",
            "Raise actor_rollout_ref.rollout.temperature.",
        ),
        metrics=("critic/score/mean", "actor/entropy"),
    )


@rule
def truncation(evidence: Evidence) -> Iterator[Warning]:
    """Responses that end because they may not be longer."""
    for name, what, key in (
        ("response_length/clip_ratio", "responses", "data.max_response_length"),
        ("prompt_length/clip_ratio", "prompts", "data.max_prompt_length"),
    ):
        share = recent_mean(evidence.series.points(name))
        if not share > 0.1:
            continue
        tries = [f"Raise {key}."]
        if what == "responses":
            tries += [
                "Punish length before the limit: reward.reward_kwargs.overlong_buffer_cfg.enable=true.",
                "See in the responses whether the policy repeats itself, or never writes its end token.",
            ]
        yield Warning(
            kind="truncation",
            severity="bad" if share > 0.5 else "warning",
            title=f"Many {what} are as long as they may be",
            seen=f"{name} is {share:.0%} over the last {RECENT} steps.",
            why="A response that is cut off mostly counts as wrong, so the policy is taught to be short instead of right."
            if what == "responses"
            else "Such prompts were cut, or nearly: the policy may not see the whole question.",
            tries=tuple(tries),
            metrics=(name, "response_length/mean"),
        )
