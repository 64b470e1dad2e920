// A response token by token, coloured by one of the numbers that were dumped with it.

const SCALE = 1000;
const COLORINGS = {
  rollout_log_probs: ["log-prob", "how likely the rollout found the token: the stronger, the less"],
  advantages: ["advantage", "what the policy was trained with: green up, pink down"],
  gap: ["trainer − rollout", "difference of the two log-probs: green where the trainer finds the token likelier"],
  token_level_scores: ["score", "where the score was given"],
  values: ["value", "what the critic expected: the stronger, the more"],
  loss_mask: ["mask", "tokens that are not trained on are struck out"],
};
let coloring = "rollout_log_probs";

function at(column, place) {
  if (column === undefined || column === null) return null;
  const value = Array.isArray(column) ? column[place] : column;
  return value === null || value === undefined ? null : value / SCALE;
}

function maskAt(column, place) {
  return column === undefined || column === 1 ? true : column[place] === "1";
}

function valueOf(tokens, name, place) {
  if (name !== "gap") return at(tokens[name], place);
  const [ours, theirs] = [at(tokens.old_log_probs, place), at(tokens.rollout_log_probs, place)];
  return ours === null || theirs === null ? null : ours - theirs;
}

function available(tokens) {
  return Object.keys(COLORINGS).filter((name) => {
    if (name === "gap") return tokens.old_log_probs !== undefined && tokens.rollout_log_probs !== undefined;
    return tokens[name] !== undefined;
  });
}

function tokenView(entry) {
  const tokens = entry.tokens;
  if (!tokens || !(tokens.text || tokens.ids || []).length)
    return h("pre", { class: "text", tabindex: 0, "data-plain": true }, entry.response || "(empty)");
  const names = available(tokens);
  const texts = tokens.text || tokens.ids.map((id) => `⟨${id}⟩`);
  const chosen = names.includes(coloring) ? coloring : names[0];
  const view = h("div", {
    class: "tokens text",
    tabindex: 0,
    role: "group",
    "aria-label": "Tokens; arrow keys read their numbers",
    "data-coloring": chosen || "none",
  });
  const spans = texts.map((text, place) => {
    const trained = maskAt(tokens.loss_mask, place);
    const span = h("span", { class: trained ? "token" : "token masked", "data-token": place }, shownText(text));
    const [color, strength] = chosen ? paintOf(tokens, chosen, place, texts.length) : [null, 0];
    if (strength > 0) {
      span.style.setProperty("--tint", color);
      span.style.setProperty("--strength", `${Math.round(60 * strength)}%`);
      span.classList.add("tinted");
    }
    return span;
  });
  fill(view, spans);
  readTokens(view, spans, tokens, texts, names);
  const radios = h(
    "fieldset",
    { class: "coloring" },
    h("legend", {}, "Colour by"),
    names.map((name) =>
      h(
        "label",
        {},
        h("input", {
          type: "radio",
          name: "coloring",
          value: name,
          checked: name === chosen,
          onchange: () => {
            coloring = name;
            view.parentElement.replaceWith(tokenView(entry));
            byId("browser-detail").querySelector(`input[value=${name}]`).focus({ preventScroll: true });
          },
        }),
        " ",
        COLORINGS[name][0],
      ),
    ),
  );
  const notice = tokens.text
    ? null
    : h(
        "p",
        { class: "hint" },
        "The tokenizer is not on this computer, so tokens are shown as ids; burnish report --tokenizer names its folder.",
      );
  return h(
    "div",
    { class: "token-view" },
    names.length ? radios : null,
    chosen ? h("p", { class: "hint" }, `${COLORINGS[chosen][1]}. ${rangeOf(tokens, chosen, texts.length)}`) : null,
    notice,
    view,
    entry.response && texts.join("") !== entry.response
      ? h("pre", { class: "text", tabindex: 0, "data-plain": true }, entry.response)
      : null,
  );
}

// Line ends, and bytes that are not yet a character, are to be seen too.
function shownText(text) {
  if (text === "") return "·";
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

function numbersOf(tokens, name, length) {
  return Array.from({ length }, (_, place) => valueOf(tokens, name, place)).filter((value) => value !== null);
}

function rangeOf(tokens, name, length) {
  if (name === "loss_mask") {
    const kept = Array.from({ length }, (_, place) => maskAt(tokens.loss_mask, place)).filter(Boolean).length;
    return `${kept} of ${length} tokens are trained on.`;
  }
  const values = numbersOf(tokens, name, length);
  if (!values.length) return "";
  const [low, high] = extent(values);
  return `${number(low, 3)} to ${number(high, 3)}, mean ${number(values.reduce((a, b) => a + b, 0) / values.length, 3)}.`;
}

const extremes = new WeakMap();
function extremesOf(tokens, name, length) {
  if (!extremes.has(tokens)) extremes.set(tokens, {});
  const known = extremes.get(tokens);
  if (!known[name]) known[name] = extent(numbersOf(tokens, name, length));
  return known[name];
}

// [colour, strength from 0 to 1]
function paintOf(tokens, name, place, length) {
  if (name === "loss_mask") return maskAt(tokens.loss_mask, place) ? ["var(--up)", 0.35] : ["var(--muted)", 0.5];
  const value = valueOf(tokens, name, place);
  if (value === null) return [null, 0];
  const [low, high] = extremesOf(tokens, name, length);
  if (name === "rollout_log_probs") return ["var(--heat)", Math.min(1, Math.sqrt(Math.max(0, -value) / 5))];
  if (name === "values") return ["var(--heat)", high > low ? (value - low) / (high - low) : 0.3];
  const largest = Math.max(Math.abs(low), Math.abs(high), name === "gap" ? 0.05 : 1e-9);
  return [value >= 0 ? "var(--up)" : "var(--down)", value === 0 ? 0 : 0.15 + (0.85 * Math.abs(value)) / largest];
}

function readTokens(view, spans, tokens, texts, names) {
  let current = -1;
  const show = (place, left, top) => {
    if (current >= 0) spans[current].classList.remove("current");
    current = place;
    spans[place].classList.add("current");
    const lines = names
      .filter((name) => name !== "loss_mask")
      .map((name) => {
        const value = valueOf(tokens, name, place);
        const likely = name === "rollout_log_probs" && value !== null ? ` (${percent(Math.exp(value))})` : "";
        return h("div", {}, `${COLORINGS[name][0]} ${number(value, 4)}${likely}`);
      });
    const masked = maskAt(tokens.loss_mask, place)
      ? null
      : h("div", {}, maskAt(tokens.response_mask, place) ? "not trained on" : "not sampled by the policy");
    showTip(left, top, h("b", {}, `token ${place}: ${JSON.stringify(texts[place])}`), lines, masked);
  };
  view.addEventListener("pointermove", (event) => {
    const place = event.target.dataset ? event.target.dataset.token : undefined;
    if (place !== undefined) show(Number(place), event.clientX, event.clientY);
  });
  const leave = () => {
    if (current >= 0) spans[current].classList.remove("current");
    hideTip();
  };
  view.addEventListener("pointerleave", leave);
  view.addEventListener("blur", leave);
  view.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (!move) return;
    event.preventDefault();
    const place = Math.min(spans.length - 1, Math.max(0, current + move));
    spans[place].scrollIntoView({ block: "nearest" });
    const box = spans[place].getBoundingClientRect();
    show(place, box.left, box.bottom);
  });
}
