// One prompt over the steps: how its responses and scores change, and two of them word against word.

const diff = { kind: null, prompt: null, left: null, right: null, heads: new Map() };
const MOST_PROMPTS = 300;
const MOST_EDITS = 1500;

function diffSection() {
  return section(
    "diff",
    "One prompt over steps",
    h("div", { class: "controls", id: "diff-controls" }),
    h("div", { id: "diff-body" }),
  );
}

// Prompts that the page has at several steps: [id, rows by step], those with the most steps first.
function recurring(run, kind) {
  const byPrompt = new Map();
  for (const row of rowsOf(run, kind)) {
    if (!byPrompt.has(row.prompt)) byPrompt.set(row.prompt, []);
    byPrompt.get(row.prompt).push(row);
  }
  return [...byPrompt]
    .map(([prompt, rows]) => [prompt, rows, new Set(rows.map((row) => row.step)).size])
    .filter((entry) => entry[2] > 1)
    .sort((a, b) => b[2] - a[2] || a[0] - b[0])
    .slice(0, MOST_PROMPTS);
}

async function drawDiff() {
  const run = theRun();
  const kinds = kindsOf(run).filter((kind) => recurring(state.run, kind).length);
  if (!kinds.length) {
    fill(byId("diff-controls"), runChooser(redrawRun));
    fill(
      byId("diff-body"),
      h(
        "p",
        {},
        "No prompt was dumped at two steps. Validation prompts are at every validation: ",
        sentence("trainer.validation_data_dir keeps their responses."),
      ),
    );
    return;
  }
  // Validation asks the same prompts each time.
  if (!kinds.includes(diff.kind)) diff.kind = kinds.includes("validation") ? "validation" : kinds[0];
  const prompts = recurring(state.run, diff.kind);
  if (!prompts.some((entry) => entry[0] === diff.prompt))
    [diff.prompt, diff.left, diff.right] = [prompts[0][0], null, null];
  for (const [prompt, rows] of prompts) {
    const key = `${state.run}-${prompt}`;
    if (!diff.heads.has(key))
      diff.heads.set(key, (await whole(rows[rows.length - 1])).prompt.replace(/\s+/g, " ").trim());
  }
  const head = (text) => (text.length > 90 ? `${text.slice(0, 30)} … ${text.slice(-55)}` : text);
  fill(
    byId("diff-controls"),
    runChooser(redrawRun),
    kinds.length > 1
      ? h(
          "label",
          {},
          "Of ",
          h(
            "select",
            {
              onchange: (event) => {
                diff.kind = event.target.value;
                drawDiff();
              },
            },
            kinds.map((kind) =>
              h("option", { value: kind, selected: kind === diff.kind }, kind === "train" ? "training" : "validation"),
            ),
          ),
        )
      : null,
    h(
      "label",
      { class: "long" },
      "Prompt ",
      h(
        "select",
        {
          id: "diff-prompt",
          onchange: (event) => {
            diff.prompt = Number(event.target.value);
            diff.left = diff.right = null;
            drawDiff();
          },
        },
        prompts.map(([prompt, , steps]) =>
          h(
            "option",
            { value: prompt, selected: prompt === diff.prompt },
            `${head(diff.heads.get(`${state.run}-${prompt}`))} (${steps} steps)`,
          ),
        ),
      ),
    ),
  );
  await drawComparison(prompts.find((entry) => entry[0] === diff.prompt)[1]);
}

async function drawComparison(rows) {
  const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b);
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const lines = (name) =>
    steps
      .map((step) => [
        step,
        rows
          .filter((row) => row.step === step)
          .map((row) => row[name])
          .filter((value) => value !== null),
      ])
      .filter((pair) => pair[1].length)
      .map(([step, values]) => [step, mean(values)]);
  const name = (row) => `${row.step}/${row.sample}`;
  const known = (wanted) => rows.find((row) => name(row) === wanted);
  const left = known(diff.left) || rows.find((row) => row.step === steps[0]);
  const right = known(diff.right) || rows.find((row) => row.step === steps[steps.length - 1]);
  const pick = (label, side, chosen) =>
    h(
      "label",
      {},
      `${label} `,
      h(
        "select",
        {
          "data-side": side,
          onchange: (event) => {
            diff[side] = event.target.value;
            drawComparison(rows);
          },
        },
        rows.map((row) =>
          h(
            "option",
            { value: name(row), selected: row === chosen },
            `step ${row.step}, response ${row.sample}, ${row.valid ? `score ${number(row.score, 3)}` : "no score"}`,
          ),
        ),
      ),
    );
  const [before, after] = [await whole(left), await whole(right)];
  const [a, b] = [words(before.response), words(after.response)];
  const edits = compare(a, b);
  const kept = edits.filter((edit) => edit[0] === "=").length;
  fill(
    byId("diff-body"),
    h("pre", { class: "text", tabindex: 0 }, before.prompt),
    h(
      "div",
      { class: "charts" },
      lineChart({
        title: "Mean score of its responses",
        height: 130,
        series: [{ name: "score", color: runColor(state.run), points: lines("score") }],
      }),
      lineChart({
        title: "Mean length of its responses, tokens",
        height: 130,
        series: [{ name: "tokens", color: runColor(state.run), points: lines("tokens") }],
      }),
    ),
    h(
      "div",
      { class: "controls" },
      pick("From", "left", left),
      pick("to", "right", right),
      h(
        "span",
        { class: "hint" },
        left === right ? "the same response" : `${percent(kept / Math.max(1, a.length, b.length))} of the words stay`,
      ),
    ),
    h(
      "pre",
      { class: "text diff", id: "diff-text", tabindex: 0 },
      joined(edits).map(([kind, text]) => (kind === "=" ? text : h(kind === "-" ? "del" : "ins", {}, text))),
    ),
  );
}

function comparePrompt(row) {
  diff.kind = row.kind;
  diff.prompt = row.prompt;
  diff.left = null;
  diff.right = `${row.step}/${row.sample}`;
  if (!recurring(row.run, row.kind).some((entry) => entry[0] === row.prompt)) {
    fill(byId("diff-body"), h("p", { role: "status" }, `The page has this prompt at step ${row.step} only.`));
    byId("diff").scrollIntoView();
    return;
  }
  drawDiff().then(() => byId("diff").scrollIntoView());
}

function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
}

// [["=" | "-" | "+", word]]: a shortest edit script (Myers 1986, "An O(ND) difference algorithm"); where texts have little in
// common, everything is replaced.
function compare(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = shortest(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const same = (part) => part.map((word) => ["=", word]);
  return [...same(a.slice(0, start)), ...middle, ...same(end ? a.slice(-end) : [])];
}

function shortest(a, b) {
  const replaced = [...a.map((word) => ["-", word]), ...b.map((word) => ["+", word])];
  if (!a.length || !b.length) return replaced;
  const most = Math.min(a.length + b.length, MOST_EDITS);
  // furthest[origin + k]: how many words of a the best path on diagonal k (words of a - words of b) has passed.
  const origin = most + 1;
  const furthest = new Int32Array(2 * most + 3);
  const trace = [];
  for (let edits = 0; edits <= most; edits += 1) {
    trace.push(furthest.slice(origin - edits - 1, origin + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const down = isDown(k, edits, furthest, origin);
      let x = down ? furthest[origin + k + 1] : furthest[origin + k - 1] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest[origin + k] = x;
      if (x >= a.length && x - k >= b.length) return walkBack(trace, a, b);
    }
  }
  return replaced;
}

// Whether the last edit on the way to diagonal k was a word of b that came in, not one of a that went.
function isDown(k, edits, furthest, origin) {
  return k === -edits || (k !== edits && furthest[origin + k - 1] < furthest[origin + k + 1]);
}

function walkBack(trace, a, b) {
  const edits = [];
  let [x, y] = [a.length, b.length];
  for (let depth = trace.length - 1; depth >= 0; depth -= 1) {
    const origin = depth + 1;
    const down = isDown(x - y, depth, trace[depth], origin);
    const before = x - y + (down ? 1 : -1);
    const fromX = trace[depth][origin + before];
    const fromY = fromX - before;
    while (x > fromX && y > fromY && x > 0 && y > 0) {
      x -= 1;
      y -= 1;
      edits.push(["=", a[x]]);
    }
    if (depth > 0) edits.push(down ? ["+", b[(y -= 1)]] : ["-", a[(x -= 1)]]);
  }
  return edits.reverse();
}

function joined(edits) {
  const parts = [];
  for (const [kind, word] of edits) {
    if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1] += word;
    else parts.push([kind, word]);
  }
  return parts;
}
