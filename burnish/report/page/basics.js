// What every part of the page uses: elements, numbers, colours, and the state that the parts share.

const state = {
  data: JSON.parse(document.getElementById("data").textContent),
  visible: [], // which runs are drawn, by number
  run: 0, // the run that sections about one run show
  axis: "step", // what curves are drawn over: step, tokens or hours
  smoothing: 0, // 0 to 0.98
  logarithmic: false,
  range: null, // [from, to] of the axis, after a zoom
  search: "", // names of curves
};
state.visible = state.data.runs.map(() => true);

const runs = () => state.data.runs;
const theRun = () => runs()[Math.min(state.run, runs().length - 1)];

// Texts of a run only ever become text nodes and attributes, never markup.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, entry] of Object.entries(value)) element.style.setProperty(key, entry);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
}

function byId(id) {
  return document.getElementById(id);
}

function fill(element, ...children) {
  element.replaceChildren(
    ...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value
      .toExponential(Math.max(0, digits - 2))
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  }
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${Number((100 * share).toPrecision(share < 0.1 ? 2 : 3))} %`;
}

function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${number(size, 3)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${number(seconds, 3)} s`;
  if (seconds < 6000) return `${number(seconds / 60, 3)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 3)} h`;
  return `${number(seconds / 86400, 3)} days`;
}

function when(time) {
  return time ? new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

const runColor = (index) => `var(--run${index % 8})`;

// Keys of the configuration and names of metrics inside a sentence are set as code.
function sentence(text) {
  const pattern =
    /((?:actor_rollout_ref|algorithm|critic|data|reward|trainer|global_profiler|ray_kwargs)(?:\.[a-z_0-9]+)+(?:=[\w.@:/-]*[\w])?)/g;
  return String(text)
    .split(pattern)
    .map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

// A name that may be broken into lines behind its slashes, dots and underscores.
function breakable(name) {
  return name.split(/(?<=[/._])/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]));
}

function runChooser(onchange) {
  if (runs().length < 2) return null;
  const options = runs().map((run, index) => h("option", { value: index, selected: index === state.run }, run.name));
  const change = (event) => {
    state.run = Number(event.target.value);
    onchange();
  };
  return h("label", {}, "Run ", h("select", { onchange: change, "data-keep": "run" }, options));
}

function section(id, title, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), ...children);
}

const tip = byId("tip");

function showTip(x, y, ...children) {
  fill(tip, ...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? Math.max(4, x - 14 - box.width) : x + 14;
  const top = y + 14 + box.height > innerHeight ? Math.max(4, y - 14 - box.height) : y + 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  tip.hidden = true;
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
addEventListener("scroll", hideTip, { passive: true });

// Draws when it is first seen, and again when its width changes.
const drawings = new Map();
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting && drawings.has(entry.target)) paint(entry.target);
  },
  { rootMargin: "300px" },
);
const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const drawing = drawings.get(target);
    if (drawing && drawing.width && Math.abs(drawing.width - contentRect.width) > 1) paint(target);
  }
});

function paint(element) {
  const drawing = drawings.get(element);
  if (element.clientWidth === 0) return;
  drawing.width = element.clientWidth;
  drawing.draw(element, element.clientWidth);
}

function drawnWhenSeen(element, draw) {
  drawings.set(element, { draw, width: 0 });
  watcher.observe(element);
  widths.observe(element);
  return element;
}

function repaintAll() {
  for (const [element, drawing] of drawings) {
    if (!element.isConnected) {
      watcher.unobserve(element);
      widths.unobserve(element);
      drawings.delete(element);
    } else if (drawing.width) paint(element);
  }
}
