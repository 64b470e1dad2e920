"""Rules of `burnish.report.warnings` on what failed, jumped, or went where it should not."""

import statistics
from collections.abc import Iterator

from burnish.report.warnings.base import RECENT, Evidence, Warning, recent_mean, rule, span

_SPIKE, _SPIKES = 10.0, 2


@rule
def reward_errors(evidence: Evidence) -> Iterator[Warning]:
    """Calls of the reward function that failed."""
    reasons = {"error": "raised an error", "timeout": "took too long", "non_finite": "returned no finite number"}
    for reason, what in reasons.items():
        for prefix in ("", "val-aux/"):
            name = f"{prefix}reward/{reason}_count"
            points = [(step, value) for step, value in evidence.series.points(name) if value > 0]
            if not points:
                continue
            rows = dict(evidence.series.points("training/num_rows"))
            share = recent_mean([(step, value / rows[step]) for step, value in points if rows.get(step)])
            yield Warning(
                kind="reward_errors",
                severity="bad" if share > 0.05 else "warning",
                title=f"The reward function {what}",
                seen=f"{name}: {sum(value for _, value in points):.0f} responses in {span([step for step, _ in points])}.",
                why="Such responses have no score: they are left out of the loss, and what they have in common is not learned.",
                tries=(
                    "Look for what they have in common: the rollouts below with the filter on responses without a score.",
                    "Score them again outside of training: burnish score --data <the dump> --reward your_file.py.",
                    *(("Raise reward.timeout.",) if reason == "timeout" else ()),
                ),
                metrics=(name,),
                steps=tuple(step for step, _ in points),
            )


@rule
def gradient_spikes(evidence: Evidence) -> Iterator[Warning]:
    """Gradients far above what is usual in the run."""
    for name, section in (("actor/grad_norm", "actor_rollout_ref.actor"), ("critic/grad_norm", "critic")):
        points = evidence.series.points(name)
        if len(points) < 10:
            continue
        usual = statistics.median(value for _, value in points)
        spikes = [(step, value) for step, value in points[5:] if usual > 0 and value > _SPIKE * usual]
        if len(spikes) < _SPIKES:
            continue
        worst = max(spikes, key=lambda point: point[1])
        yield Warning(
            kind="grad_norm_spikes",
            severity="warning",
            title=f"The {name.partition('/')[0]}'s gradient jumps",
            seen=f"{name} is more than {_SPIKE:.0f} times its median ({usual:.3g}) in {span([step for step, _ in spikes])}, "
            f"at most {worst[1]:.3g} in step {worst[0]}.",
            why="A few odd batches move the weights more than all others. Clipping bounds the step, not its direction.",
            tries=(
                f"Clip earlier: a smaller {section}.optim.clip_grad.",
                f"Halve {section}.optim.lr.",
                "Look at these steps' longest responses and largest advantages in the rollouts.",
            ),
            metrics=(name,),
            steps=tuple(step for step, _ in spikes),
        )


@rule
def updates_left_out(evidence: Evidence) -> Iterator[Warning]:
    """Updates that were skipped, or had no token to learn from."""
    what = {
        "skipped_updates": ("skipped for a gradient that is not finite", "bad"),
        "empty_updates": ("had no token to train on", "warning"),
    }
    for role in ("actor", "critic"):
        for kind, (reason, severity) in what.items():
            points = [(step, value) for step, value in evidence.series.points(f"{role}/{kind}") if value > 0]
            if not points:
                continue
            tries = (
                "Look at the losses and the log-probs of these steps: which value left the range first?",
                f"Halve {'critic' if role == 'critic' else 'actor_rollout_ref.actor'}.optim.lr, and clip gradients earlier.",
                "Train in bfloat16 or float32: float16 overflows.",
            )
            if kind == "empty_updates":
                tries = (
                    "See whether rows lost their score, or rollout correction rejected them (rollout_corr/*).",
                    "Widen algorithm.rollout_correction.rollout_rs_threshold if it rejects too much.",
                    "Leave out groups that do not vary before the update: algorithm.filter_groups.enable=true.",
                )
            yield Warning(
                kind=kind,
                severity=severity,
                title=f"Updates of the {role} {reason}"
                if kind == "empty_updates"
                else f"Updates of the {role} were {reason}",
                seen=f"{role}/{kind}: {sum(value for _, value in points):.0f} in {span([step for step, _ in points])}.",
                why="The step's responses were paid for and taught nothing.",
                tries=tries,
                metrics=(f"{role}/{kind}", f"{role}/grad_norm"),
                steps=tuple(step for step, _ in points),
            )


@rule
def rollout_gap(evidence: Evidence) -> Iterator[Warning]:
    """A rollout engine that does not sample from the policy that is trained."""
    points = evidence.series.points("training/rollout_probs_diff_mean")
    correlation = recent_mean(evidence.series.points("training/rollout_actor_probs_pearson_corr"))
    gap = recent_mean(points)
    usual = statistics.median(value for _, value in points[:5]) if points else 0.0
    has_grown = len(points) > 10 and gap > max(4 * usual, usual + 0.01)
    if not (gap > 0.02 or correlation < 0.98 or has_grown):
        return
    grown = f" It was {usual:.3g} in the first steps." if has_grown else ""
    yield Warning(
        kind="rollout_gap",
        severity="bad" if gap > 0.1 or correlation < 0.9 else "warning",
        title="Rollout and trainer disagree on probabilities",
        seen=f"The mean difference of the sampled tokens' probabilities is {gap:.3g} over the last {RECENT} steps"
        + (f", their correlation {correlation:.4g}." if correlation == correlation else ".")
        + grown,
        why="The policy is trained on responses that another policy sampled, which makes the updates biased. Rounding alone is "
        "smaller, and does not grow.",
        tries=(
            "Weigh tokens by the difference: algorithm.rollout_correction.preset=decoupled_token_is.",
            "Let both compute in the same precision: actor_rollout_ref.rollout.dtype as the trainer's.",
            "If it has grown: see that every update reaches the rollout (timing_s/update_weights, its checksums).",
        ),
        metrics=("training/rollout_probs_diff_mean", "training/rollout_actor_probs_pearson_corr"),
    )


@rule
def values_that_explain_nothing(evidence: Evidence) -> Iterator[Warning]:
    """A critic that is worse than a constant."""
    points = evidence.series.points("critic/vf_explained_var")
    now = recent_mean(points)
    if len(points) > 2 * RECENT and now < 0.0:
        yield Warning(
            kind="explained_variance",
            severity="warning",
            title="The critic explains nothing",
            seen=f"critic/vf_explained_var is {now:.3g} over the last {RECENT} steps; a constant would have 0.",
            why="Advantages are then noisier than without a critic.",
            tries=(
                "Train the critic first: trainer.critic_warmup=20.",
                "Raise critic.optim.lr, several times the actor's is usual.",
                "Do without it: algorithm.adv_estimator=grpo.",
            ),
            metrics=("critic/vf_explained_var", "critic/vf_loss"),
        )


@rule
def no_progress(evidence: Evidence) -> Iterator[Warning]:
    """Scores that are all the same, and a validation that gets worse."""
    lows, highs = evidence.series.points("critic/score/min"), evidence.series.points("critic/score/max")
    seen = [low for _, low in lows] + [high for _, high in highs]
    if len(lows) >= 5 and max(seen) == min(seen):
        yield Warning(
            kind="constant_score",
            severity="bad",
            title="Every response has the same score",
            seen=f"All scores of {len(lows)} steps are {seen[0]:.3g}.",
            why="There is nothing to tell responses apart by, so nothing is learned.",
            tries=(
                "Read some responses: does the reward function find the answer where the policy writes it?",
                "Score a right answer by hand: burnish check scores reference solutions before training.",
                "Start with easier prompts, or an instruction that shows the form of the answer.",
            ),
            metrics=("critic/score/mean",),
        )
    for name in evidence.series.columns:
        points = evidence.series.points(name)
        if not name.startswith("val-core/") or not name.rpartition("/")[2].startswith("mean@") or len(points) < 4:
            continue
        best, last = max(points, key=lambda point: point[1]), points[-1]
        spread = best[1] - min(value for _, value in points)
        if best[0] != last[0] and spread > 0 and best[1] - last[1] > max(0.02, 0.5 * spread):
            yield Warning(
                kind="validation_falls",
                severity="warning",
                title="Validation gets worse",
                seen=f"{name} was {best[1]:.4g} at step {best[0]} and is {last[1]:.4g} at step {last[0]}.",
                why="The policy learns what the training data or their reward pay for, and loses what the validation asks for.",
                tries=(
                    f"Go on from, or take, the checkpoint nearest to step {best[0]}.",
                    "Halve actor_rollout_ref.actor.optim.lr, or hold the policy near the reference: "
                    "actor_rollout_ref.actor.use_kl_loss=true.",
                    "Compare responses to the same prompt at both steps in the rollouts below.",
                ),
                metrics=(name, "critic/score/mean"),
                steps=(best[0], last[0]),
            )


@rule
def values_that_are_not_finite(evidence: Evidence) -> Iterator[Warning]:
    """NaN and infinities among the metrics."""
    found = evidence.series.non_finite
    if not found:
        return
    first = min(found, key=lambda name: (found[name][0], name))
    steps = sorted({step for at in found.values() for step in at})
    yield Warning(
        kind="non_finite",
        severity="bad",
        title="Metrics are not finite",
        seen=f"{', '.join(sorted(found)[:5])}{' and others' if len(found) > 5 else ''} are NaN or infinite in {span(steps)}, "
        f"first {first} in step {found[first][0]}.",
        why="What is computed from them says nothing. burnish skips an update whose gradient is not finite.",
        tries=(
            f"Look at the step before {found[first][0]} first: its gradient, its longest responses, its largest advantages.",
            "Halve actor_rollout_ref.actor.optim.lr.",
        ),
        metrics=(first,),
        steps=tuple(steps),
    )


@rule
def length_changes(evidence: Evidence) -> Iterator[Warning]:
    """Responses that grow or shrink without getting better."""
    lengths, scores = evidence.series.points("response_length/mean"), evidence.series.points("critic/score/mean")
    if len(lengths) < 2 * RECENT or len(scores) < 2 * RECENT:
        return
    first, now = statistics.fmean(value for _, value in lengths[:5]), recent_mean(lengths, 5)
    before, after = statistics.fmean(value for _, value in scores[:5]), recent_mean(scores, 5)
    is_better = after > before + 0.05 * (max(value for _, value in scores) - min(value for _, value in scores))
    if is_better or first <= 0 or 0.5 <= now / first <= 2:
        return
    grows = now > first
    yield Warning(
        kind="length_drift",
        severity="warning",
        title=f"Responses get {'longer' if grows else 'shorter'} and not better",
        seen=f"The mean length went from {first:.4g} to {now:.4g} tokens, the mean score from {before:.3g} to {after:.3g}.",
        why="The updates follow something that goes with length, not with being right.",
        tries=(
            "Weigh tokens alike: actor_rollout_ref.actor.loss_agg_mode=token-mean.",
            "Read the longest responses: repetition is common."
            if grows
            else "Read some responses: is anything left of them?",
            "Punish length: reward.reward_kwargs.overlong_buffer_cfg.enable=true."
            if grows
            else "Lower the learning rate.",
        ),
        metrics=("response_length/mean", "critic/score/mean"),
    )


@rule
def aborted(evidence: Evidence) -> Iterator[Warning]:
    """Responses that the engine gave up."""
    share = recent_mean(evidence.series.points("response/aborted_ratio"))
    if share > 0.02:
        yield Warning(
            kind="aborted",
            severity="warning",
            title="The engine gave responses up",
            seen=f"response/aborted_ratio is {share:.1%} over the last {RECENT} steps.",
            why="An aborted response is cut somewhere and tells little of the policy.",
            tries=("Look at the events and the log for what the engine said.",),
            metrics=("response/aborted_ratio",),
        )
