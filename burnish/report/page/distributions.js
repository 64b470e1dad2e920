// How scores and lengths are spread over the steps: from dumped responses, and as bands from the metrics.

const BANDS = [
  ["Score", "critic/score"],
  ["Response length", "response_length"],
  ["Advantage", "critic/advantages"],
  ["Prompt length", "prompt_length"],
];

function distributionsSection() {
  return section(
    "distributions",
    "Distributions",
    h("div", { class: "controls", id: "distributions-controls" }),
    h("div", { id: "distributions-body", class: "charts two" }),
  );
}

function drawDistributions() {
  const run = theRun();
  fill(byId("distributions-controls"), runChooser(redrawRun));
  const charts = [];
  for (const [kind, found] of Object.entries(run.histograms)) {
    const total = found.rows.reduce((a, b) => a + b, 0);
    const all = kind === "train" ? run.rows_of_a_step * run.rollouts[kind].steps.length : 0;
    for (const [name, title] of [
      ["score", "scores"],
      ["length", "lengths in tokens"],
    ]) {
      if (!found[name]) continue;
      charts.push(
        heatMap({
          title: `${kind === "train" ? "Training" : "Validation"} ${title}`,
          note: `${number(total)} dumped responses${all > total ? ` of about ${number(all)}` : ""}`,
          x: found.steps,
          ...found[name],
        }),
      );
    }
  }
  for (const [title, name] of BANDS) {
    const mean = pointsOfSteps(run, `${name}/mean`);
    if (!mean.length) continue;
    charts.push(
      lineChart({
        title: `${title}: mean, and from lowest to highest`,
        height: 200,
        series: [
          {
            name: "mean",
            color: runColor(state.run),
            points: mean,
            low: pointsOfSteps(run, `${name}/min`),
            high: pointsOfSteps(run, `${name}/max`),
          },
        ],
      }),
    );
  }
  fill(
    byId("distributions-body"),
    charts.length ? charts : h("p", {}, "No step has been logged and no response was dumped."),
  );
}
