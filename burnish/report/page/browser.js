// The responses themselves: filtered, searched, one of them open beside the list.

const PAGE_ROWS = 25;
const browser = {
  kind: "train",
  step: "",
  source: "",
  finish: "",
  valid: "",
  low: "",
  high: "",
  order: "newest",
  text: "",
  page: 0,
  open: null,
  found: [],
  busy: 0,
};
const ORDERS = {
  newest: ["newest first", (a, b) => b.step - a.step],
  best: ["best score first", (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)],
  worst: ["worst score first", (a, b) => (a.score ?? -Infinity) - (b.score ?? -Infinity)],
  longest: ["longest first", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)],
  shortest: ["shortest first", (a, b) => (a.tokens ?? 0) - (b.tokens ?? 0)],
};

function browserSection() {
  return section(
    "rollouts",
    "Rollouts",
    h("div", { id: "browser-controls", class: "controls" }),
    h("p", { id: "browser-count", class: "hint", role: "status" }),
    h(
      "div",
      { class: "split" },
      h("div", { id: "browser-list" }),
      h("div", { id: "browser-detail", tabindex: -1, role: "region", "aria-label": "The open response" }),
    ),
  );
}

function kindsOf(run) {
  return Object.keys(run.rollouts);
}

function choice(label, name, options) {
  return h(
    "label",
    {},
    `${label} `,
    h(
      "select",
      {
        "data-filter": name,
        onchange: (event) => {
          browser[name] = event.target.value;
          if (name === "kind") {
            browser.step = "";
            drawBrowser();
          } else applyFilters();
        },
      },
      options.map(([value, text]) => h("option", { value, selected: String(value) === String(browser[name]) }, text)),
    ),
  );
}

function drawBrowser() {
  const run = theRun();
  const kinds = kindsOf(run);
  if (!kinds.length) {
    fill(byId("browser-controls"), runChooser(redrawRun));
    byId("browser-count").textContent = "";
    fill(
      byId("browser-list"),
      h(
        "p",
        {},
        "No responses were dumped. ",
        sentence(
          "trainer.sample_rollouts keeps some of every step in the run's folder, trainer.rollout_data_dir keeps all, trainer.validation_data_dir those of validations.",
        ),
      ),
    );
    fill(byId("browser-detail"));
    return;
  }
  if (!kinds.includes(browser.kind)) browser.kind = kinds[0];
  const index = run.rollouts[browser.kind];
  const steps = index.steps
    .filter((entry) => entry.rows.length)
    .map((entry) => [
      entry.step,
      `${entry.step} (${entry.rows.length}${entry.rows.length < entry.total ? ` of ${entry.total}` : ""})`,
    ])
    .reverse();
  if (browser.step !== "" && !steps.some(([step]) => String(step) === String(browser.step))) browser.step = "";
  const field = (label, name, type, hint) =>
    h(
      "label",
      {},
      `${label} `,
      h("input", {
        type,
        value: browser[name],
        placeholder: hint,
        step: "any",
        "data-filter": name,
        class: type === "number" ? "short" : null,
        oninput: (event) => {
          browser[name] = event.target.value;
          applyFilters();
        },
      }),
    );
  fill(
    byId("browser-controls"),
    runChooser(redrawRun),
    kinds.length > 1
      ? choice(
          "Of",
          "kind",
          kinds.map((kind) => [kind, kind === "train" ? "training" : "validation"]),
        )
      : null,
    choice("Step", "step", [["", "all"], ...steps]),
    index.sources.length > 1
      ? choice("Source", "source", [["", "all"], ...index.sources.map((source) => [source, source || "(none)"])])
      : null,
    index.finishes.length > 1
      ? choice("Ended by", "finish", [["", "all"], ...index.finishes.map((finish) => [finish, finish || "(unknown)"])])
      : null,
    choice("Scored", "valid", [
      ["", "all"],
      ["1", "with a score"],
      ["0", "without a score"],
    ]),
    field("Score from", "low", "number", "any"),
    field("to", "high", "number", "any"),
    choice(
      "Order",
      "order",
      Object.entries(ORDERS).map(([name, [text]]) => [name, text]),
    ),
    field("Search", "text", "search", "words in prompt or response"),
  );
  applyFilters(true);
}

let searching = 0;
async function applyFilters(keepPage) {
  const turn = (searching += 1);
  const { low, high } = browser;
  let rows = rowsOf(state.run, browser.kind).filter(
    (row) =>
      (browser.step === "" || row.step === Number(browser.step)) &&
      (browser.source === "" || row.source === browser.source) &&
      (browser.finish === "" || row.finish === browser.finish) &&
      (browser.valid === "" || row.valid === (browser.valid === "1")) &&
      (low === "" || (row.score !== null && row.score >= Number(low))) &&
      (high === "" || (row.score !== null && row.score <= Number(high))),
  );
  rows = rows
    .map((row, place) => [row, place])
    .sort((a, b) => ORDERS[browser.order][1](a[0], b[0]) || a[1] - b[1])
    .map((pair) => pair[0]);
  const words = browser.text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length) {
    const hits = new Set();
    const steps = [...new Set(rows.map((row) => row.step))];
    for (const [place, step] of steps.entries()) {
      byId("browser-count").textContent = `Searching step ${step} (${place + 1} of ${steps.length}) …`;
      for (const row of rows.filter((candidate) => candidate.step === step)) {
        const { prompt, response } = await whole(row);
        if (turn !== searching) return;
        const text = `${prompt}\n${response}`.toLowerCase();
        if (words.every((word) => text.includes(word))) hits.add(row);
      }
    }
    rows = rows.filter((row) => hits.has(row));
  }
  if (turn !== searching) return;
  browser.found = rows;
  if (keepPage !== true) browser.page = 0;
  await drawList();
}

async function drawList() {
  const pages = Math.max(1, Math.ceil(browser.found.length / PAGE_ROWS));
  browser.page = Math.min(browser.page, pages - 1);
  const shown = browser.found.slice(browser.page * PAGE_ROWS, (browser.page + 1) * PAGE_ROWS);
  const turn = searching;
  let texts;
  try {
    texts = await Promise.all(shown.map(whole));
  } catch (error) {
    fill(byId("browser-list"), h("p", { class: "error" }, error.message));
    return;
  }
  if (turn !== searching) return;
  const total = rowsOf(state.run, browser.kind).length;
  byId("browser-count").textContent = `${number(browser.found.length)} of ${number(total)} responses`;
  const turnTo = (page) => {
    browser.page = page;
    drawList().then(() => byId("browser-list").scrollIntoView({ block: "nearest" }));
  };
  const pager =
    pages < 2
      ? null
      : h(
          "div",
          { class: "pager" },
          h(
            "button",
            { type: "button", disabled: browser.page === 0, onclick: () => turnTo(browser.page - 1) },
            "← Before",
          ),
          ` ${browser.page + 1} of ${pages} `,
          h(
            "button",
            { type: "button", disabled: browser.page === pages - 1, onclick: () => turnTo(browser.page + 1) },
            "Next →",
          ),
        );
  const line = (text) => text.replace(/\s+/g, " ").trim();
  fill(
    byId("browser-list"),
    h(
      "ul",
      { class: "rows" },
      shown.map((row, index) =>
        h(
          "li",
          {},
          h(
            "button",
            {
              type: "button",
              class: "row",
              "aria-pressed": String(isOpen(row)),
              "data-row": nameOf(row),
              onclick: (event) => openRow(row, event.currentTarget),
            },
            h(
              "span",
              { class: "facts" },
              h("b", { class: row.valid ? null : "error" }, row.valid ? number(row.score, 3) : "no score"),
              ` step ${row.step}`,
              row.tokens === null ? "" : ` · ${number(row.tokens)} tokens`,
              row.finish && row.finish !== "stop" ? ` · ${row.finish}` : "",
            ),
            h("span", { class: "prompt" }, line(texts[index].prompt).slice(-110)),
            h("span", { class: "response" }, line(texts[index].response).slice(0, 140) || "(empty)"),
          ),
        ),
      ),
    ),
    pager,
  );
  if (!browser.open && shown.length) await openRow(shown[0], null);
}

const nameOf = (row) => `${row.run}-${row.kind}-${row.step}-${row.place}`;
const isOpen = (row) => browser.open !== null && nameOf(browser.open) === nameOf(row);

async function openRow(row, button) {
  browser.open = row;
  for (const other of document.querySelectorAll("#browser-list .row"))
    other.setAttribute("aria-pressed", String(other.dataset.row === nameOf(row)));
  const detail = byId("browser-detail");
  let entry;
  try {
    entry = await whole(row);
  } catch (error) {
    fill(detail, h("p", { class: "error" }, error.message));
    return;
  }
  if (!isOpen(row)) return;
  const group = rowsOf(row.run, row.kind).filter((other) => other.step === row.step && other.prompt === row.prompt);
  const at = group.indexOf(row);
  const extras = Object.entries(entry.extras || {}).filter(([name]) => name !== "valid");
  fill(
    detail,
    h(
      "div",
      { class: "controls" },
      h("b", {}, `Step ${row.step}, response ${row.sample}`),
      h("button", { type: "button", disabled: at <= 0, onclick: () => openRow(group[at - 1], null) }, "← Sibling"),
      h("span", { class: "hint" }, `${at + 1} of ${group.length} to this prompt`),
      h(
        "button",
        { type: "button", disabled: at >= group.length - 1, onclick: () => openRow(group[at + 1], null) },
        "Sibling →",
      ),
      h("button", { type: "button", onclick: () => comparePrompt(row) }, "This prompt over steps"),
    ),
    h(
      "dl",
      { class: "facts" },
      fact("score", row.valid ? number(row.score, 6) : "none"),
      fact("tokens", number(row.tokens)),
      fact("ended by", row.finish || "–"),
      row.source ? fact("source", row.source) : null,
      fact("uid", entry.uid || "–"),
    ),
    h("h3", {}, "Prompt"),
    h("pre", { class: "text", tabindex: 0 }, entry.prompt),
    h("h3", {}, "Response"),
    tokenView(entry),
    extras.length
      ? [
          h("h3", {}, "What the reward said, and the row"),
          h(
            "div",
            { class: "scroll" },
            h(
              "table",
              { class: "extras" },
              h(
                "tbody",
                {},
                extras.map(([name, value]) =>
                  h(
                    "tr",
                    {},
                    h("th", { scope: "row" }, name),
                    h("td", {}, typeof value === "object" ? JSON.stringify(value) : String(value)),
                  ),
                ),
              ),
            ),
          ),
        ]
      : null,
  );
  if (button && matchMedia("(max-width: 800px)").matches) detail.scrollIntoView();
}

function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}
