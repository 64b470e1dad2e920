// What there is to see at once: how the run stands, its headline curves, and what looks wrong.

const HEADLINES = [
  "critic/score/mean",
  "critic/rewards/mean",
  "response_length/mean",
  "actor/entropy",
  "actor/grad_norm",
  "actor/ppo_kl",
  "actor/kl_loss",
  "critic/vf_explained_var",
  "timing_s/step",
  "perf/throughput",
];
const SEVERITY = { bad: "Act", warning: "Look" };

function lastOf(run, name) {
  const points = pointsOfSteps(run, name);
  return points.length ? points[points.length - 1] : null;
}

function pointsOfSteps(run, name) {
  return (run.metrics[name] || [])
    .map((value, place) => [run.steps[place], value])
    .filter((point) => point[1] !== null);
}

function validationNames(run) {
  return Object.keys(run.metrics).filter((name) => name.startsWith("val-core/") && /\/mean@\d+$/.test(name));
}

function headlineNames() {
  const names = new Set();
  for (const run of runs())
    validationNames(run)
      .slice(0, 2)
      .forEach((name) => names.add(name));
  for (const name of HEADLINES) if (runs().some((run) => name in run.metrics)) names.add(name);
  if (runs().some((run) => "critic/score/mean" in run.metrics)) names.delete("critic/rewards/mean");
  return [...names].slice(0, 9);
}

function tile(label, value, detail) {
  return h(
    "div",
    { class: "tile" },
    h("div", { class: "label" }, label),
    h("div", { class: "value" }, value),
    h("div", { class: "detail" }, detail || ""),
  );
}

function tiles(run) {
  const found = [];
  const total = run.status.total;
  found.push(tile("Step", number(run.status.step), total ? `of ${number(total)}` : ""));
  const score = pointsOfSteps(run, "critic/score/mean");
  // Of a long run a point is the lowest or the highest value of a stretch.
  const isThinned = run.num_steps > run.steps.length;
  if (score.length) {
    const mean = (points) => points.reduce((sum, point) => sum + point[1], 0) / points.length;
    found.push(
      tile(
        isThinned ? "Score, last 10 points" : "Score, last 10 steps",
        number(mean(score.slice(-10)), 3),
        `${number(mean(score.slice(0, 5)), 3)} in the first five`,
      ),
    );
  }
  for (const name of validationNames(run).slice(0, 2)) {
    const points = pointsOfSteps(run, name);
    // None of its values may have been finite.
    if (!points.length) continue;
    const best = points.reduce((a, b) => (b[1] > a[1] ? b : a));
    found.push(
      tile(
        breakable(name.replace("val-core/", "")),
        number(points[points.length - 1][1], 3),
        `best ${number(best[1], 3)} ${isThinned ? "near" : "at"} step ${number(best[0])}`,
      ),
    );
  }
  const seconds = pointsOfSteps(run, "timing_s/step").map((point) => point[1]);
  if (seconds.length) {
    const recent = seconds.slice(-20);
    const mean = recent.reduce((a, b) => a + b, 0) / recent.length;
    const left =
      total && run.status.step !== null && run.status.state === "running"
        ? ` · ${duration(mean * Math.max(0, total - run.status.step))} to go`
        : "";
    found.push(
      tile(
        "A step takes",
        duration(mean),
        `${duration(run.axes.seconds[run.axes.seconds.length - 1])} in all${left}`,
      ),
    );
  }
  const pace = lastOf(run, "perf/throughput");
  if (pace) found.push(tile("Tokens a second, a device", number(pace[1], 3), ""));
  const memory = lastOf(run, "perf/max_memory_allocated_gb");
  if (memory && memory[1] > 0) found.push(tile("Device memory", `${number(memory[1], 3)} GB`, "at most"));
  return h("div", { class: "tiles" }, found);
}

function overviewSection() {
  return section(
    "overview",
    "Overview",
    h("div", { id: "overview-status" }),
    h("div", { id: "overview-charts", class: "charts" }),
  );
}

function drawOverview() {
  drawStatus();
  fill(
    byId("overview-charts"),
    headlineNames().map((name) => curve(name, 170)),
  );
}

function drawStatus() {
  const blocks = runs().map((run, index) => {
    const color = h("i", { class: "key", style: { background: runColor(index) } });
    return h(
      "div",
      { class: "run" },
      h(
        "p",
        { class: "status" },
        runs().length > 1 ? [color, h("b", {}, run.name), " "] : null,
        h("span", { class: `state ${run.status.state}` }, run.status.state),
        " ",
        run.status.text,
        run.status.time ? h("span", { class: "hint" }, ` ${when(run.status.time)}`) : null,
      ),
      tiles(run),
      workersTable(run),
      run.notes.length
        ? h(
            "details",
            { class: "notes" },
            h(
              "summary",
              {},
              `${run.notes.length} ${run.notes.length > 1 ? "things" : "thing"} to know about this page`,
            ),
            h(
              "ul",
              {},
              run.notes.map((note) => h("li", {}, sentence(note))),
            ),
          )
        : null,
    );
  });
  fill(byId("overview-status"), blocks);
}

function workersTable(run) {
  const workers = Object.entries(run.status.workers || {});
  if (!workers.length || !["running", "silent"].includes(run.status.state)) return null;
  return h(
    "details",
    {},
    h("summary", {}, `${workers.length} workers`),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["worker", "stage", "since", "pid", "node"].map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          workers.map(([name, worker]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, name),
              h("td", {}, String(worker.stage ?? "–")),
              h("td", {}, when(worker.since)),
              h("td", {}, String(worker.pid ?? "–")),
              h("td", {}, String(worker.node ?? "–")),
            ),
          ),
        ),
      ),
    ),
  );
}

function warningsSection() {
  return section("warnings", "Warnings", h("div", { id: "warnings-body" }));
}

function drawWarnings() {
  const all = runs().flatMap((run) => run.warnings.map((warning) => ({ run, warning })));
  if (!all.length) {
    const seen = runs().some((run) => run.num_steps);
    fill(
      byId("warnings-body"),
      h(
        "p",
        {},
        seen
          ? "Nothing looks wrong: clipping, KL, entropy, groups, lengths, rewards, gradients and the rollout's probabilities are as usual."
          : "There is nothing to judge yet.",
      ),
    );
    return;
  }
  fill(
    byId("warnings-body"),
    h(
      "div",
      { class: "cards" },
      all.map(({ run, warning }) =>
        h(
          "article",
          { class: `card ${warning.severity}`, "data-kind": warning.kind },
          h(
            "h3",
            {},
            h("span", { class: "badge" }, SEVERITY[warning.severity]),
            " ",
            warning.title,
            runs().length > 1 ? h("span", { class: "hint" }, ` · ${run.name}`) : null,
          ),
          h("p", {}, sentence(warning.seen)),
          h("p", {}, sentence(warning.why)),
          h("p", { class: "try" }, "What to try:"),
          h(
            "ol",
            {},
            warning.tries.map((text) => h("li", {}, sentence(text))),
          ),
          h(
            "p",
            { class: "links" },
            warning.metrics.map((name) =>
              h("button", { type: "button", class: "link", onclick: () => findCurve(name) }, name),
            ),
          ),
        ),
      ),
    ),
  );
}
