// Settings with their origins, events, and what else lies in the runs' folders.

const tables = { setting: "", onlySet: true, onlyDifferent: false, eventKind: "" };

function tablesSections() {
  return [
    section(
      "configuration",
      "Configuration",
      h("div", { class: "controls", id: "configuration-controls" }),
      h("div", { id: "configuration-body" }),
    ),
    section(
      "events",
      "Events",
      h("div", { class: "controls", id: "events-controls" }),
      h("div", { id: "events-body" }),
    ),
    section("files", "Files", h("div", { id: "files-body" })),
  ];
}

function drawConfigurationControls() {
  const check = (name, text) =>
    h(
      "label",
      {},
      h("input", {
        type: "checkbox",
        checked: tables[name],
        onchange: (event) => {
          tables[name] = event.target.checked;
          drawConfiguration();
        },
      }),
      ` ${text}`,
    );
  fill(
    byId("configuration-controls"),
    h(
      "label",
      {},
      "Find ",
      h("input", {
        type: "search",
        id: "setting-search",
        placeholder: "lr, rollout.n …",
        value: tables.setting,
        oninput: (event) => {
          tables.setting = event.target.value;
          drawConfiguration();
        },
      }),
    ),
    check("onlySet", "only what is not the default"),
    runs().length > 1 ? check("onlyDifferent", "only what differs between runs") : null,
  );
}

function settingText(value) {
  return value === null || value === undefined ? "null" : typeof value === "string" ? value : JSON.stringify(value);
}

function drawConfiguration() {
  const keys = [...new Set(runs().flatMap((run) => Object.keys(run.config)))];
  const isSet = (run, key) => run.config[key] && run.config[key][1] !== "default";
  const words_ = tables.setting.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = keys.filter((key) => {
    const values = runs().map((run) => settingText((run.config[key] || [undefined])[0]));
    const text = `${key} ${values.join(" ")}`.toLowerCase();
    return (
      words_.every((word) => text.includes(word)) &&
      (!tables.onlySet || words_.length || runs().some((run) => isSet(run, key))) &&
      (!tables.onlyDifferent || new Set(values).size > 1)
    );
  });
  if (!keys.length) {
    fill(byId("configuration-body"), h("p", {}, "The run's config.yaml is not there."));
    return;
  }
  const heads = runs().length > 1 ? runs().flatMap((run) => [run.name, "from"]) : ["value", "from"];
  fill(
    byId("configuration-body"),
    h("p", { class: "hint", role: "status" }, `${shown.length} of ${keys.length} settings`),
    h(
      "div",
      { class: "scroll tall" },
      h(
        "table",
        { class: "settings", style: { "--runs": runs().length } },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "key"),
            heads.map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          shown.map((key) => {
            const values = runs().map((run) => settingText((run.config[key] || [undefined])[0]));
            const differs = new Set(values).size > 1;
            return h(
              "tr",
              { class: differs ? "differs" : null },
              h("th", { scope: "row" }, breakable(key)),
              runs().map((run, index) => {
                const origin = (run.config[key] || [null, null])[1];
                return [
                  h("td", {}, h("code", {}, values[index])),
                  h("td", {}, origin ? h("span", { class: `origin ${origin.split(" ")[0]}` }, origin) : "–"),
                ];
              }),
            );
          }),
        ),
      ),
    ),
  );
}

const TROUBLE = new Set(["worker_death", "hang", "out_of_disk", "restart", "signal", "warning"]);

function drawEvents() {
  const all = runs().flatMap((run, index) => run.events.map((event) => ({ run, index, event })));
  if (!all.length) {
    fill(byId("events-controls"));
    fill(byId("events-body"), h("p", {}, "The run has written no events."));
    return;
  }
  const kinds = [...new Set(all.map(({ event }) => String(event.kind)))].sort();
  fill(
    byId("events-controls"),
    h(
      "label",
      {},
      "Kind ",
      h(
        "select",
        {
          onchange: (event) => {
            tables.eventKind = event.target.value;
            drawEvents();
          },
        },
        ["", ...kinds].map((kind) => h("option", { value: kind, selected: kind === tables.eventKind }, kind || "all")),
      ),
    ),
  );
  const shown = all
    .filter(({ event }) => !tables.eventKind || String(event.kind) === tables.eventKind)
    .sort((a, b) => (b.event.time || 0) - (a.event.time || 0));
  const more = ({ time, step, kind, message, ...rest }) =>
    Object.keys(rest).length
      ? h("details", {}, h("summary", {}, "more"), h("pre", { class: "text" }, JSON.stringify(rest, null, 1)))
      : null;
  fill(
    byId("events-body"),
    h(
      "div",
      { class: "scroll tall" },
      h(
        "table",
        { class: "events" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["time", runs().length > 1 ? "run" : null, "step", "kind", "what"]
              .filter(Boolean)
              .map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          shown
            .slice(0, 500)
            .map(({ run, index, event }) =>
              h(
                "tr",
                {},
                h("td", { class: "nowrap" }, when(event.time)),
                runs().length > 1
                  ? h("td", {}, h("i", { class: "key", style: { background: runColor(index) } }), run.name)
                  : null,
                h("td", { class: "number" }, number(event.step)),
                h(
                  "td",
                  {},
                  h("span", { class: TROUBLE.has(event.kind) ? "kind trouble" : "kind" }, String(event.kind)),
                ),
                h("td", {}, String(event.message ?? ""), more(event)),
              ),
            ),
        ),
      ),
    ),
    shown.length > 500 ? h("p", { class: "hint" }, `The newest 500 of ${number(shown.length)} events.`) : null,
  );
}

function drawFiles() {
  fill(
    byId("files-body"),
    runs().map((run) => [
      h("p", {}, h("code", {}, run.path)),
      run.files.length
        ? h(
            "div",
            { class: "scroll tall" },
            h(
              "table",
              {},
              h(
                "tbody",
                {},
                run.files.map((file) =>
                  h(
                    "tr",
                    {},
                    h("td", {}, h("code", {}, file.path)),
                    h("td", {}, file.what),
                    h("td", { class: "number" }, bytes(file.bytes)),
                  ),
                ),
              ),
            ),
          )
        : h("p", { class: "hint" }, "No checkpoints, profiles or stack dumps."),
      run.files.some((file) => file.what === "profiler output")
        ? h(
            "p",
            { class: "hint" },
            "Traces open at ui.perfetto.dev or chrome://tracing, memory snapshots at pytorch.org/memory_viz.",
          )
        : null,
    ]),
  );
}
