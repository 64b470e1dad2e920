// Puts the page together, and keeps it up to date where it is served.

const SECTIONS = [
  ["overview", "Overview"],
  ["warnings", "Warnings"],
  ["curves", "Curves"],
  ["stages", "Stages"],
  ["distributions", "Distributions"],
  ["rollouts", "Rollouts"],
  ["diff", "Over steps"],
  ["configuration", "Configuration"],
  ["events", "Events"],
  ["files", "Files"],
];

function drawHeader() {
  const names = runs()
    .map((run) => run.name)
    .join(", ");
  fill(
    byId("top"),
    h(
      "div",
      { class: "brand" },
      h("h1", {}, names || "burnish report"),
      h(
        "p",
        { class: "hint", id: "freshness", role: "status" },
        state.data.live ? "Live: follows the runs as they go on." : `As of ${when(state.data.generated)}.`,
      ),
    ),
    runs().length > 1
      ? h(
          "fieldset",
          { class: "runs" },
          h("legend", {}, "Runs"),
          runs().map((run, index) =>
            h(
              "label",
              {},
              h("input", {
                type: "checkbox",
                checked: state.visible[index],
                onchange: (event) => {
                  state.visible[index] = event.target.checked;
                  drawOverview();
                  drawCurves();
                },
              }),
              h("i", { class: "key", style: { background: runColor(index) } }),
              run.name,
            ),
          ),
        )
      : null,
  );
}

function drawContents() {
  const count = runs().reduce((sum, run) => sum + run.warnings.length, 0);
  fill(
    byId("contents"),
    SECTIONS.map(([id, title]) =>
      h(
        "a",
        { href: `#${id}` },
        title,
        id === "warnings" && count ? h("span", { class: "count" }, String(count)) : null,
      ),
    ),
  );
}

// What shows one run, after another one was chosen.
function redrawRun() {
  browser.open = null;
  browser.page = 0;
  drawStages();
  drawDistributions();
  drawBrowser();
  drawDiff();
}

// What is drawn anew when these parts of a run have changed.
const PARTS = [
  [["status", "notes"], () => drawStatus()],
  [
    ["metrics", "steps", "non_finite"],
    () => {
      drawOverview();
      drawCurves();
    },
  ],
  [
    ["warnings"],
    () => {
      drawWarnings();
      drawContents();
    },
  ],
  [["stages", "bottleneck"], () => drawStages()],
  [["histograms", "metrics"], () => drawDistributions()],
  [["config"], () => drawConfiguration()],
  [["events"], () => drawEvents()],
  [["files"], () => drawFiles()],
  [
    ["rollouts"],
    () => {
      unpacked.clear();
      if (!byId("browser-controls").contains(document.activeElement)) drawBrowser();
      if (!byId("diff").contains(document.activeElement)) drawDiff();
    },
  ],
];

function start() {
  fill(
    byId("main"),
    overviewSection(),
    warningsSection(),
    curvesSection(),
    stagesSection(),
    distributionsSection(),
    browserSection(),
    diffSection(),
    tablesSections(),
  );
  drawHeader();
  drawConfigurationControls();
  for (const [, draw] of PARTS) draw();
  document.documentElement.dataset.ready = "true";
  if (state.data.live) setTimeout(refresh, 1000 * state.data.refresh_s, "");
}

// The newest data; only what has changed is drawn anew, so that what is being read or typed stays.
async function refresh(version) {
  let next = version;
  try {
    const answer = await fetch(`data.json?version=${encodeURIComponent(version)}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    next = found.version;
    const before = state.data;
    state.data = found.data || before;
    const statuses = JSON.stringify(before.runs.map((run) => run.status));
    runs().forEach((run, index) => {
      run.status = found.statuses[index];
    });
    const changed = (name) =>
      name === "status"
        ? statuses !== JSON.stringify(found.statuses)
        : found.data &&
          runs().some((run, index) => JSON.stringify(run[name]) !== JSON.stringify(before.runs[index][name]));
    const [left, top] = [scrollX, scrollY];
    for (const [names, draw] of PARTS) if (names.some(changed)) draw();
    repaintAll();
    scrollTo(left, top);
    byId("freshness").textContent = `Live: as of ${when(Date.now() / 1000)}.`;
  } catch {
    byId("freshness").textContent = "The server does not answer; what is shown is what was last known.";
  }
  setTimeout(refresh, 1000 * state.data.refresh_s, next);
}

start();
