// Curves, bands, stacked bars and heat maps, as SVG that follows the page's colours.

const MARGIN = { top: 8, right: 10, bottom: 22, left: 52 };

// Round numbers between low and high.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

function scale(low, high, from, to) {
  const width = high - low || 1;
  return (value) => from + ((value - low) / width) * (to - from);
}

// An exponential moving average that is not drawn to where it starts (weights sum to one from the first point on).
function smooth(points, weight) {
  if (!weight) return points;
  let sum = 0;
  let total = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

function path(points, x, y) {
  return points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
}

function frame(width, height, x, y, xTicks, yTicks, ofY = number, ofX = number) {
  const grid = svg("g", { class: "grid" });
  for (const value of yTicks) {
    grid.append(
      svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svg("text", { x: MARGIN.left - 5, y: y(value) + 3.5, "text-anchor": "end" }, ofY(value, 3)),
    );
  }
  for (const value of xTicks) {
    grid.append(svg("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, ofX(value, 4)));
  }
  return grid;
}

// What someone who does not see the curve is told of it.
function inWords(title, series) {
  const parts = series
    .filter((one) => one.points.length)
    .map(({ name, points }) => {
      const values = points.map((point) => point[1]);
      const low = values.reduce((a, b) => Math.min(a, b), Infinity);
      const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
      const [first, last] = [points[0], points[points.length - 1]];
      return (
        `${name}: ${number(first[1])} at ${number(first[0])}, ${number(last[1])} at ${number(last[0])}, ` +
        `lowest ${number(low)}, highest ${number(high)}`
      );
    });
  return `${title}. ${parts.join(". ") || "No values."}`;
}

// options: title, series [{name, color, points [[x, y]], low, high}], ofX, onZoom, note
function lineChart(options) {
  const box = h("div", { class: "plot" });
  const caption = h("figcaption", { title: options.title }, options.title);
  if (options.note) caption.append(h("span", { class: "note" }, ` ${options.note}`));
  drawnWhenSeen(box, (element, width) => drawLines(element, width, options));
  return h("figure", { class: "chart", "data-chart": options.title }, caption, box);
}

function drawLines(element, width, options) {
  const height = options.height || 150;
  const inRange = ([x]) => !state.range || !options.zooms || (x >= state.range[0] && x <= state.range[1]);
  const log = options.zooms && state.logarithmic;
  const series = options.series.map((one) => {
    const points = one.points.filter((point) => !log || point[1] > 0);
    return {
      ...one,
      points: points.filter(inRange),
      smoothed: smooth(points, options.zooms ? state.smoothing : 0).filter(inRange),
    };
  });
  const all = series.flatMap((one) => one.points);
  const given = options.series.flatMap((one) => one.points.filter(inRange));
  const hidden =
    given.length > all.length
      ? `${given.length - all.length} of ${given.length} values are not above 0: a logarithmic axis has no place for them.`
      : null;
  if (!all.length) {
    fill(element, h("p", { class: "empty" }, hidden || "No values here."));
    return;
  }
  const ofY = log ? Math.log10 : (value) => value;
  const xs = all.map((point) => point[0]);
  const bands = series.flatMap((one) => (one.low || []).concat(one.high || []));
  const ys = all.concat(bands).map((point) => ofY(point[1]));
  const [xLow, xHigh] = extent(xs);
  let [yLow, yHigh] = extent(ys);
  if (yLow === yHigh) {
    const pad = Math.abs(yLow) * 0.1 || 0.5;
    yLow -= pad;
    yHigh += pad;
  }
  const x = scale(xLow, xHigh, MARGIN.left, width - MARGIN.right);
  const inner = scale(yLow, yHigh, height - MARGIN.bottom, MARGIN.top);
  const y = (value) => inner(ofY(value));
  const yTicks = ticks(yLow, yHigh, 5);
  const grid = frame(
    width,
    height,
    x,
    inner,
    ticks(xLow, xHigh, Math.max(2, width / 90)),
    yTicks,
    log ? (value) => number(10 ** value, 2) : number,
    options.ofX || number,
  );
  const drawing = svg(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      tabindex: 0,
      role: "img",
      "aria-label": inWords(options.title, series),
    },
    grid,
  );
  for (const one of series) {
    if (one.low && one.low.length) {
      drawing.append(
        svg("path", {
          class: "band",
          fill: one.color,
          d: `${path(one.high, x, y)}${path([...one.low].reverse(), x, y).replace("M", "L")}Z`,
        }),
      );
    }
    const isSmoothed = options.zooms && state.smoothing > 0;
    if (isSmoothed) drawing.append(svg("path", { class: "line raw", stroke: one.color, d: path(one.points, x, y) }));
    drawing.append(svg("path", { class: "line", stroke: one.color, d: path(one.smoothed, x, y) }));
    if (one.points.length < 30) {
      for (const [a, b] of one.smoothed) drawing.append(svg("circle", { cx: x(a), cy: y(b), r: 2.2, fill: one.color }));
    }
  }
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  const selection = svg("rect", {
    class: "selection",
    y: MARGIN.top,
    height: height - MARGIN.bottom - MARGIN.top,
    visibility: "hidden",
  });
  drawing.append(selection, cursor);
  readOut(drawing, cursor, selection, {
    series,
    x,
    xLow,
    xHigh,
    width,
    options,
    places: [...new Set(xs)].sort((a, b) => a - b),
  });
  fill(element, drawing, hidden && h("p", { class: "hint" }, hidden));
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// Pointer and arrow keys read values out; a stretch that is dragged over, or Shift with the keys, is zoomed into.
function readOut(drawing, cursor, selection, chart) {
  const { series, x, places, options } = chart;
  let place = places.length - 1;
  let dragged = null;
  const back = (pixel) =>
    chart.xLow + ((pixel - MARGIN.left) / (chart.width - MARGIN.right - MARGIN.left)) * (chart.xHigh - chart.xLow);
  const nearest = (value) => {
    let best = 0;
    places.forEach((candidate, index) => {
      if (Math.abs(candidate - value) < Math.abs(places[best] - value)) best = index;
    });
    return best;
  };
  const show = (left, top) => {
    const at = places[place];
    setAll(cursor, { x1: x(at), x2: x(at), visibility: "visible" });
    const lines = series
      .filter((one) => one.points.length)
      .map((one) => {
        const [where, value] = one.points.reduce((best, point) =>
          Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best,
        );
        const away = where === at ? "" : ` (at ${(options.ofX || number)(where)})`;
        return h(
          "div",
          {},
          h("i", { class: "key", style: { background: one.color } }),
          `${one.name} ${number(value, 6)}${away}`,
        );
      });
    showTip(left, top, h("b", {}, `${options.xName || "step"} ${(options.ofX || number)(at)}`), lines);
  };
  drawing.addEventListener("pointermove", (event) => {
    const pixel = event.clientX - drawing.getBoundingClientRect().left;
    place = nearest(back(pixel));
    if (dragged !== null) {
      setAll(selection, { x: Math.min(dragged, pixel), width: Math.abs(pixel - dragged), visibility: "visible" });
    }
    show(event.clientX, event.clientY);
  });
  drawing.addEventListener("pointerleave", () => {
    dragged = null;
    setAll(cursor, { visibility: "hidden" });
    setAll(selection, { visibility: "hidden" });
    hideTip();
  });
  drawing.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length, PageUp: -10, PageDown: 10 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    place = Math.min(places.length - 1, Math.max(0, place + moves[event.key]));
    const box = drawing.getBoundingClientRect();
    show(box.left + x(places[place]), box.top + 20);
  });
  drawing.addEventListener("blur", () => {
    setAll(cursor, { visibility: "hidden" });
    hideTip();
  });
  if (!options.zooms) return;
  drawing.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") dragged = event.clientX - drawing.getBoundingClientRect().left;
  });
  drawing.addEventListener("pointerup", (event) => {
    const pixel = event.clientX - drawing.getBoundingClientRect().left;
    if (dragged !== null && Math.abs(pixel - dragged) > 8)
      zoom([back(Math.min(dragged, pixel)), back(Math.max(dragged, pixel))]);
    dragged = null;
  });
  drawing.addEventListener("dblclick", () => zoom(null));
}

// Counts of values by column and bin, the darker the more. options: title, x [labels], low, high, counts, rows
function heatMap(options) {
  const box = h("div", { class: "plot" });
  const figure = h(
    "figure",
    { class: "chart wide", "data-chart": options.title },
    h("figcaption", {}, options.title, options.note ? h("span", { class: "note" }, ` ${options.note}`) : null),
    box,
  );
  drawnWhenSeen(box, (element, width) => {
    const height = 220;
    const [columns, bins] = [options.counts.length, options.counts[0].length];
    const y = scale(options.low, options.high, height - MARGIN.bottom, MARGIN.top);
    const cell = (width - MARGIN.left - MARGIN.right) / columns;
    const x = (index) => MARGIN.left + cell * (index + 0.5);
    const wanted = ticks(0, columns - 1, Math.max(2, Math.min(columns, width / 90))).filter(Number.isInteger);
    const drawing = svg(
      "svg",
      {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        tabindex: 0,
        "aria-label": `${options.title}, from ${number(options.low)} to ${number(options.high)}, for ${columns} columns of steps`,
      },
      frame(width, height, x, y, wanted, ticks(options.low, options.high, 5), number, (index) =>
        number(options.x[index]),
      ),
    );
    const size = (height - MARGIN.top - MARGIN.bottom) / bins;
    const cells = svg("g", { class: "heat" });
    options.counts.forEach((counts, column) => {
      const total = counts.reduce((a, b) => a + b, 0) || 1;
      counts.forEach((count, bin) => {
        if (!count) return;
        cells.append(
          svg("rect", {
            x: MARGIN.left + cell * column,
            y: height - MARGIN.bottom - size * (bin + 1),
            width: Math.max(0.6, cell - (cell > 6 ? 1 : 0)),
            height: Math.max(0.6, size - 0.5),
            opacity: (0.12 + 0.88 * Math.sqrt(count / total)).toFixed(2),
          }),
        );
      });
    });
    drawing.append(cells);
    let at = columns - 1;
    const show = (left, top) => {
      const counts = options.counts[at];
      const edge = (bin) => options.low + ((options.high - options.low) * bin) / bins;
      const total = counts.reduce((a, b) => a + b, 0);
      const lines = counts
        .map((count, bin) => (count ? [bin, count] : null))
        .filter(Boolean)
        .reverse()
        .slice(0, 12);
      showTip(
        left,
        top,
        h("b", {}, `step ${number(options.x[at])}, ${number(total)} responses`),
        lines.map(([bin, count]) =>
          h("div", {}, `${number(edge(bin), 3)} to ${number(edge(bin + 1), 3)}: ${percent(count / total)}`),
        ),
      );
    };
    drawing.addEventListener("pointermove", (event) => {
      const pixel = event.clientX - drawing.getBoundingClientRect().left - MARGIN.left;
      at = Math.min(columns - 1, Math.max(0, Math.floor(pixel / cell)));
      show(event.clientX, event.clientY);
    });
    drawing.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      at = Math.min(columns - 1, Math.max(0, at + move));
      const place = drawing.getBoundingClientRect();
      show(place.left + x(at), place.top + 20);
    });
    drawing.addEventListener("pointerleave", hideTip);
    drawing.addEventListener("blur", hideTip);
    fill(element, drawing);
  });
  return figure;
}
