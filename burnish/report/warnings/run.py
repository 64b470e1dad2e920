"""Rules of `burnish.report.warnings` on what happened to the run itself: failures, restarts, what was thrown away."""

from collections.abc import Iterator

from burnish.report.warnings.base import RECENT, Evidence, Warning, recent_mean, rule, span

_EVENTS = {
    "worker_death": "A worker died",
    "hang": "A stage hung",
    "out_of_disk": "The disk was full",
    "restart": "Workers were started anew",
}


@rule
def events(evidence: Evidence) -> Iterator[Warning]:
    """Deaths, hangs and restarts that the run told of."""
    for kind, title in _EVENTS.items():
        found = [event for event in evidence.events if event.get("kind") == kind]
        if not found:
            continue
        steps = sorted({event["step"] for event in found if isinstance(event.get("step"), int)})
        times = "once" if len(found) == 1 else f"{len(found)} times"
        place = f", in {span(steps)}" if steps else ""
        yield Warning(
            kind=kind,
            severity="warning",
            title=title,
            seen=f"{times[:1].upper()}{times[1:]}{place}. The last: {found[-1].get('message', 'it says no more.')}",
            why="What the run had not saved is computed again, and what happened once often happens again.",
            tries=(
                "Read the events below, and the stack dumps where there are any.",
                "Save more often: trainer.save_freq.",
            ),
            steps=tuple(steps),
        )


@rule
def unfinished_steps(evidence: Evidence) -> Iterator[Warning]:
    """Steps that ended in an error."""
    steps = [step for step, value in evidence.series.points("training/failed") if value > 0]
    if steps:
        yield Warning(
            kind="failed_steps",
            severity="bad",
            title="Steps were not finished",
            seen=f"training/failed: {span(steps)}.",
            why="An error or a stop ended the step; its other metrics are those that were there by then.",
            tries=("Read the events below and the log of that time.",),
            metrics=("training/failed",),
            steps=tuple(steps),
        )


@rule
def lost_files(evidence: Evidence) -> Iterator[Warning]:
    """Checkpoints that were not written or copied, metrics that were not logged."""
    for name, severity, title, advice in (
        ("checkpoint/failed_saves", "bad", "Checkpoints were not saved", "Make room: trainer.max_actor_ckpt_to_keep."),
        (
            "checkpoint/failed_uploads",
            "warning",
            "Checkpoints were not copied",
            "Look whether trainer.default_hdfs_dir can be written to.",
        ),
        (
            "logging/dropped_values",
            "warning",
            "Metrics were left out of the log",
            "Let your reward function and your loss return plain numbers.",
        ),
    ):
        points = [(step, value) for step, value in evidence.series.points(name) if value > 0]
        if points:
            yield Warning(
                kind=name.partition("/")[2],
                severity=severity,
                title=title,
                seen=f"{name} is {points[-1][1]:.0f} in step {points[-1][0]}, and not 0 in {span([step for step, _ in points])}.",
                why="A run that ends now would lose more than it should."
                if severity == "bad"
                else "The run goes on without it.",
                tries=(advice, "Read the events below: they say what went wrong."),
                metrics=(name,),
                steps=tuple(step for step, _ in points),
            )


@rule
def what_is_thrown_away(evidence: Evidence) -> Iterator[Warning]:
    """Responses that dynamic sampling or rollout correction leave out."""
    constant = recent_mean(evidence.series.points("filter_groups/constant_prompts"))
    kept = recent_mean(evidence.series.points("filter_groups/kept_prompts"))
    if constant > 3 * kept:
        yield Warning(
            kind="filtered_groups",
            severity="warning",
            title="Dynamic sampling throws most responses away",
            seen=f"Over the last {RECENT} steps {constant:.0f} prompts a step were left out, as all their responses did equally "
            f"well, and {kept:.0f} were kept.",
            why="Most of the time goes into responses that teach nothing.",
            tries=(
                "Choose prompts of another difficulty, or leave out those that are always or never solved.",
                "Sample more responses to each prompt: actor_rollout_ref.rollout.n.",
            ),
            metrics=("filter_groups/constant_prompts", "filter_groups/kept_prompts", "train/num_gen_batches"),
        )
    rejected = recent_mean(evidence.series.points("rollout_corr/rollout_rs_masked_fraction"))
    if rejected > 0.3:
        yield Warning(
            kind="rejected_tokens",
            severity="warning",
            title="Rollout correction rejects a lot",
            seen=f"rollout_corr/rollout_rs_masked_fraction is {rejected:.0%} over the last {RECENT} steps.",
            why="Rejected tokens are not trained on. So many mean that rollout and trainer are far apart.",
            tries=(
                "Find out why they differ: precision, sampling settings, stale weights.",
                "Weigh instead of rejecting: algorithm.rollout_correction.preset=decoupled_token_is.",
                "Widen algorithm.rollout_correction.rollout_rs_threshold.",
            ),
            metrics=("rollout_corr/rollout_rs_masked_fraction", "training/rollout_probs_diff_mean"),
        )
