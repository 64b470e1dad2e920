// All metrics: searched, smoothed, zoomed into, several runs over each other.

const FIRST_GROUPS = ["val-core", "critic", "actor", "response_length", "reward"];
const openGroups = new Set(FIRST_GROUPS);

function groupOf(name) {
  return name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
}

// The place of each step on the axis: its number, tokens so far, or hours so far.
function axisOf(run) {
  if (state.axis === "step") return run.steps;
  return state.axis === "tokens" ? run.axes.tokens : run.axes.seconds.map((total) => total / 3600);
}

function pointsOf(run, name) {
  const values = run.metrics[name] || [];
  const axis = axisOf(run);
  const points = [];
  values.forEach((value, place) => {
    if (value !== null) points.push([axis[place], value]);
  });
  return points;
}

function curve(name, height) {
  const series = [];
  let odd = 0;
  runs().forEach((run, index) => {
    if (!state.visible[index] || !(name in run.metrics)) return;
    series.push({ name: run.name, color: runColor(index), points: pointsOf(run, name) });
    odd += run.non_finite[name] || 0;
  });
  return lineChart({
    title: name,
    series,
    height,
    zooms: true,
    xName: state.axis,
    note: odd ? `${odd} values not finite` : "",
  });
}

function allNames() {
  const names = new Set();
  runs().forEach((run, index) => {
    if (state.visible[index])
      Object.keys(run.metrics)
        .concat(Object.keys(run.non_finite))
        .forEach((name) => names.add(name));
  });
  return [...names].filter((name) => name !== "training/global_step");
}

function curvesSection() {
  const search = h("input", {
    type: "search",
    id: "curve-search",
    placeholder: "entropy, val-core, timing_s …",
    value: state.search,
    oninput: (event) => {
      state.search = event.target.value;
      drawCurves();
    },
  });
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 98,
    step: 1,
    value: Math.round(100 * state.smoothing),
    id: "smoothing",
    oninput: (event) => {
      state.smoothing = Number(event.target.value) / 100;
      repaintAll();
    },
  });
  const axis = h(
    "select",
    {
      id: "axis",
      onchange: (event) => {
        state.axis = event.target.value;
        state.range = null;
        drawCurves();
        drawOverview();
      },
    },
    [
      ["step", "steps"],
      ["tokens", "tokens"],
      ["hours", "hours of steps"],
    ].map(([value, text]) => h("option", { value, selected: value === state.axis }, text)),
  );
  const log = h("input", {
    type: "checkbox",
    checked: state.logarithmic,
    onchange: (event) => {
      state.logarithmic = event.target.checked;
      repaintAll();
    },
  });
  return section(
    "curves",
    "Curves",
    h(
      "div",
      { class: "controls" },
      h("label", {}, "Find ", search),
      h("label", {}, "Smooth ", slider),
      h("label", {}, "Over ", axis),
      h("label", {}, log, " logarithmic"),
      h("span", { id: "zoom-controls" }),
    ),
    h("p", { id: "curve-count", class: "hint", role: "status" }),
    h("div", { id: "curve-groups" }),
  );
}

function drawCurves() {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  const names = allNames().filter((name) => words.every((word) => name.toLowerCase().includes(word)));
  const groups = new Map();
  for (const name of names) {
    const group = groupOf(name);
    groups.set(group, (groups.get(group) || []).concat(name));
  }
  const rank = (group) => (FIRST_GROUPS.includes(group) ? FIRST_GROUPS.indexOf(group) : 99);
  const order = [...groups.keys()].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  fill(
    byId("curve-groups"),
    order.map((group) => {
      const grid = h("div", { class: "charts" });
      const isOpen = words.length ? names.length <= 60 || openGroups.has(group) : openGroups.has(group);
      const details = h(
        "details",
        { class: "group", open: isOpen },
        h("summary", {}, h("b", {}, group), ` ${groups.get(group).length}`),
        grid,
      );
      const draw = () => {
        if (details.open && !grid.childElementCount)
          fill(
            grid,
            groups
              .get(group)
              .sort()
              .map((name) => curve(name)),
          );
      };
      details.addEventListener("toggle", () => {
        if (!words.length) details.open ? openGroups.add(group) : openGroups.delete(group);
        draw();
      });
      draw();
      return details;
    }),
  );
  const total = allNames().length;
  byId("curve-count").textContent = total
    ? `${names.length} of ${total} metrics. Drag over a stretch to zoom in; arrow keys read values out.`
    : "No step has been logged yet.";
  drawZoom();
}

function drawZoom() {
  const reset = h("button", { type: "button", onclick: () => zoom(null) }, "Whole run");
  fill(
    byId("zoom-controls"),
    state.range ? [`${state.axis} ${number(state.range[0], 4)} to ${number(state.range[1], 4)} `, reset] : null,
  );
}

function zoom(range) {
  state.range = range;
  drawZoom();
  hideTip();
  repaintAll();
}

function findCurve(name) {
  state.search = name;
  byId("curve-search").value = name;
  drawCurves();
  byId("curves").scrollIntoView();
  byId("curve-search").focus({ preventScroll: true });
}
