// Responses of a step: packed in the page, or fetched from the server; unpacked when they are first looked at.

const unpacked = new Map();
const MOST_UNPACKED = 60;

async function unpack(text) {
  if (typeof DecompressionStream === "undefined")
    throw new Error("This browser is too old to unpack rollouts (it lacks DecompressionStream).");
  const packed = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// {prompts, rows} of a step; an empty one where the page has none.
function chunk(run, kind, step) {
  const name = `${run}-${kind}-${step}`;
  if (unpacked.has(name)) {
    const found = unpacked.get(name);
    unpacked.delete(name);
    unpacked.set(name, found);
    return found;
  }
  const found = load(run, kind, step).catch((error) => {
    unpacked.delete(name);
    throw error;
  });
  unpacked.set(name, found);
  if (unpacked.size > MOST_UNPACKED) unpacked.delete(unpacked.keys().next().value);
  return found;
}

async function load(run, kind, step) {
  const element = byId(`chunk-${run}-${kind}-${step}`);
  if (element) return unpack(element.textContent);
  if (!state.data.live) return { prompts: {}, rows: [] };
  const answer = await fetch(`chunk/${run}/${kind}/${step}`);
  if (!answer.ok) throw new Error(`The server has no rollouts of step ${step} (${answer.status}).`);
  return unpack(await answer.text());
}

// Kept rows of a run and a kind, as objects that know where the whole of them is.
const rowCache = new Map();

function rowsOf(run, kind) {
  const found = runs()[run].rollouts[kind];
  if (!found) return [];
  const key = `${run}-${kind}`;
  if (rowCache.has(key) && rowCache.get(key).of === found) return rowCache.get(key).rows;
  const rows = found.steps.flatMap(({ step, rows: kept }) =>
    kept.map(([prompt, score, tokens, source, finish, sample, valid], place) => ({
      run,
      kind,
      step,
      place,
      prompt,
      score,
      tokens,
      source: found.sources[source],
      finish: found.finishes[finish],
      sample,
      valid: valid === 1 && score !== null,
    })),
  );
  rowCache.set(key, { of: found, rows });
  return rows;
}

// A row with its texts: {prompt, response, uid, extras, tokens}.
async function whole(row) {
  const { prompts, rows } = await chunk(row.run, row.kind, row.step);
  const entry = rows[row.place] || {};
  const tokens = entry.tokens || null;
  return {
    ...entry,
    prompt: prompts[row.prompt] ?? "",
    tokens,
    response: entry.response ?? (tokens && tokens.text ? tokens.text.join("") : ""),
  };
}
