// Where a step's time goes: stacked bars over the steps, and the bottleneck with the keys to turn.

let sharesShown = false;
const stageColor = (index) => `var(--stage${index % 12})`;

function stagesSection() {
  return section(
    "stages",
    "Stages",
    h("div", { class: "controls", id: "stages-controls" }),
    h("div", { id: "stages-body" }),
  );
}

function drawStages() {
  const run = theRun();
  const toggle = h("input", {
    type: "checkbox",
    checked: sharesShown,
    onchange: (event) => {
      sharesShown = event.target.checked;
      drawStages();
    },
  });
  const has = run.stages.steps.length > 0;
  fill(byId("stages-controls"), runChooser(redrawRun), has ? h("label", {}, toggle, " as shares of the step") : null);
  if (!has) {
    fill(byId("stages-body"), h("p", {}, "No step has logged its seconds (timing_s/step)."));
    return;
  }
  const names = Object.keys(run.stages.seconds);
  const box = h("div", { class: "plot" });
  drawnWhenSeen(box, (element, width) => drawBars(element, width, run, names));
  const legend = h(
    "ul",
    { class: "legend" },
    names.map((name, index) => h("li", {}, h("i", { class: "key", style: { background: stageColor(index) } }), name)),
  );
  const title =
    run.stages.width > 1
      ? `Seconds of each stage; a bar is the mean of ${run.stages.width} steps`
      : "Seconds of each stage, step by step";
  fill(
    byId("stages-body"),
    h("figure", { class: "chart wide", "data-chart": "stages" }, h("figcaption", {}, title), legend, box),
    bottleneck(run),
  );
}

function drawBars(element, width, run, names) {
  const height = 240;
  const { steps, seconds } = run.stages;
  const totals = steps.map((_, place) => names.reduce((sum, name) => sum + seconds[name][place], 0));
  const top = sharesShown ? 1 : totals.reduce((a, b) => Math.max(a, b), 0);
  const y = scale(0, top, height - MARGIN.bottom, MARGIN.top);
  const cell = (width - MARGIN.left - MARGIN.right) / steps.length;
  const x = (place) => MARGIN.left + cell * (place + 0.5);
  const wanted = ticks(0, steps.length - 1, Math.max(2, Math.min(steps.length, width / 90))).filter(Number.isInteger);
  const mean = names
    .map((name, index) => [name, seconds[name].reduce((a, b) => a + b, 0) / steps.length, index])
    .sort((a, b) => b[1] - a[1]);
  const words = mean
    .slice(0, 4)
    .map(([name, value]) => `${name} ${duration(value)}`)
    .join(", ");
  const drawing = svg(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      tabindex: 0,
      "aria-label": `Seconds of each stage over ${steps.length} steps. On average: ${words}.`,
    },
    frame(width, height, x, y, wanted, ticks(0, top, 5), sharesShown ? percent : number, (place) =>
      number(steps[place]),
    ),
  );
  steps.forEach((_, place) => {
    let sum = 0;
    names.forEach((name, index) => {
      const value = seconds[name][place] / (sharesShown ? totals[place] || 1 : 1);
      if (!value) return;
      drawing.append(
        svg("rect", {
          x: MARGIN.left + cell * place,
          width: Math.max(0.8, cell - (cell > 5 ? 1 : 0)),
          y: y(sum + value),
          height: Math.max(0, y(sum) - y(sum + value)),
          fill: stageColor(index),
        }),
      );
      sum += value;
    });
  });
  let at = steps.length - 1;
  const show = (left, top_) => {
    const lines = names
      .map((name, index) => [name, seconds[name][at], index])
      .filter((line) => line[1])
      .sort((a, b) => b[1] - a[1]);
    showTip(
      left,
      top_,
      h("b", {}, `step ${number(steps[at])}: ${duration(totals[at])}`),
      lines.map(([name, value, index]) =>
        h(
          "div",
          {},
          h("i", { class: "key", style: { background: stageColor(index) } }),
          `${name} ${duration(value)} (${percent(value / totals[at])})`,
        ),
      ),
    );
  };
  drawing.addEventListener("pointermove", (event) => {
    at = Math.min(
      steps.length - 1,
      Math.max(0, Math.floor((event.clientX - drawing.getBoundingClientRect().left - MARGIN.left) / cell)),
    );
    show(event.clientX, event.clientY);
  });
  drawing.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    at = Math.min(steps.length - 1, Math.max(0, at + move));
    const place = drawing.getBoundingClientRect();
    show(place.left + x(at), place.top + 20);
  });
  drawing.addEventListener("pointerleave", hideTip);
  drawing.addEventListener("blur", hideTip);
  fill(element, drawing);
}

function bottleneck(run) {
  if (!run.bottleneck.length) return null;
  const rows = run.bottleneck.filter((finding) => finding.share > 0.005);
  return h(
    "div",
    { id: "bottleneck" },
    h("h3", {}, "The bottleneck"),
    h(
      "p",
      { class: "hint" },
      "Over the last 20 steps, the largest possible gain first: seconds a step beyond those that the same work takes where nothing is wrong.",
    ),
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
            ["stage", "seconds", "share", "of the device", "could gain", "what to do"].map((name) =>
              h("th", { scope: "col" }, name),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((finding) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, finding.stage),
              h("td", { class: "number" }, number(finding.seconds, 3)),
              h(
                "td",
                { class: "number" },
                h("span", { class: "bar", style: { "--share": finding.share } }),
                percent(finding.share),
              ),
              h(
                "td",
                { class: "number" },
                finding.utilisation === null ? "–" : `${percent(finding.utilisation)} of ${finding.ceiling}`,
              ),
              h("td", { class: "number" }, duration(finding.gap_s)),
              h(
                "td",
                {},
                sentence(finding.advice),
                finding.keys.length ? [" ", finding.keys.map((key) => [h("code", {}, key), " "])] : null,
              ),
            ),
          ),
        ),
      ),
    ),
  );
}
