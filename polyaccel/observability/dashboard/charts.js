"use strict";
// Charts as SVG, drawn again at the width that their card has. A chart is a value: { unit, lines or areas, marks }.

const SVG = "http://www.w3.org/2000/svg";
// What the reader has chosen for all charts: how much curves are smoothed, a scale, and the steps that are shown.
const view = { smoothing: 2, log: false, from: -Infinity, to: Infinity };
const HEIGHT = 210, TOP = 20, BOTTOM = 26, RIGHT = 10;

function make(name, attributes = {}, ...inside) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...inside.filter((one) => one !== null && one !== undefined));
  return node;
}

function draw(name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "stroke" || key === "fill") node.style[key] = value; // which takes var(--name)
    else node.setAttribute(key, value);
  }
  if (text !== null) node.textContent = text;
  return node;
}

// Numbers in words: of each unit a scale that fits the greatest, so that an axis has one unit.
const UNITS = {
  "": [[1, ""]],
  s: [[1e-6, "µs"], [1e-3, "ms"], [1, "s"], [60, "min"]],
  B: [[1, "B"], [1024, "KiB"], [1024 ** 2, "MiB"], [1024 ** 3, "GiB"], [1024 ** 4, "TiB"]],
};

function scaleOf(unit, most) {
  const steps = UNITS[unit];
  if (steps === undefined) return [1, unit];
  let chosen = steps[0];
  for (const step of steps) if (Math.abs(most) >= 0.9999 * step[0]) chosen = step;
  return chosen;
}

function digits(value, precision = 4, least = 1e-3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6 || size < least) {
    const [mantissa, exponent] = value.toExponential(Math.max(0, precision - 2)).split("e");
    return `${String(Number(mantissa))}e${Number(exponent)}`;
  }
  const text = Number(value.toPrecision(precision));
  return text.toLocaleString("en", { maximumFractionDigits: 6 });
}

function words(value, unit) {
  if (value === null || value === undefined) return "–";
  const [scale, name] = scaleOf(unit, value);
  return `${digits(value / scale)}${name ? " " + name : ""}`;
}

// Multiples of 1, 2, 2.5 or 5: of the largest such step that gives `count` ticks or more.
function ticksOf(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  for (const factor of [10, 5, 2.5, 2, 1, 0.5]) {
    const step = factor * power, first = Math.ceil(low / step - 1e-9), length = Math.floor(high / step + 1e-9) - first + 1;
    if (length >= count || factor === 0.5) return Array.from({ length }, (_, at) => (first + at) * step + 0); // not -0
  }
}

// Of a logarithmic axis: 1, 2 and 5 times powers of ten, or what a linear axis has where these are too few.
function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) ticks.push(...[1, 2, 5].map((one) => one * 10 ** power));
  const found = ticks.filter((one) => one >= low && one <= high), powers = found.filter((one) => /^1e/.test(one.toExponential()));
  return powers.length > 3 ? powers : found.length > 2 ? found : ticksOf(low, high, 3);
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const list of values) {
    for (const value of list) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

// The top of an axis on which single peaks, as of a first step, may be cut off so that the rest can be read.
function cutAt(ys, high) {
  const values = ys.flat().filter((value) => value !== null).sort((one, other) => one - other);
  const usual = values[Math.floor(0.97 * (values.length - 1))];
  return values.length > 8 && usual > 0 && high > 3 * usual ? 1.4 * usual : high;
}

// The mean of the values around each, over a fortieth of all as a rule.
function smoothed(ys) {
  const reach = Math.max(1, Math.floor((ys.length * view.smoothing) / 160));
  return ys.map((value, at) => {
    if (value === null) return null;
    const near = ys.slice(Math.max(0, at - reach), at + reach + 1).filter((one) => one !== null);
    return near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

// The frame of a chart: axes with their unit, and where a value stands.
function frame(node, { unit, fromZero, cuts, areas }, xs, ys) {
  const width = Math.max(260, Math.floor(node.clientWidth || 380));
  node.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  node.setAttribute("height", HEIGHT);
  let [left, right] = bounds(xs), [low, high] = bounds(ys);
  const isLog = view.log && !areas && low > 0 && high > low;
  if (left === right) { left -= 0.5; right += 0.5; }
  const peak = high;
  if (cuts && !isLog) high = cutAt(ys, high);
  if (isLog) { const room = (high / low) ** 0.05; low /= room; high *= room; }
  else if (fromZero) low = Math.min(0, low), high = Math.max(0, high);
  if (isLog) fromZero = false;
  else if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= fromZero && low === 0 ? 0 : room; high += room; }
  else { const room = (high - low) * 0.05; high += room; if (!(fromZero && low === 0)) low -= room; }
  const [scale, name] = scaleOf(unit, Math.max(Math.abs(low), Math.abs(high)));
  const ticks = isLog ? logTicks(low / scale, high / scale) : ticksOf(low / scale, high / scale, 4);
  const spacing = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
  const most = Math.max(...ticks.map(Math.abs));
  const precision = Math.min(9, Math.max(2, Math.ceil(Math.log10(Math.max(1, most / spacing))) + 2));
  const least = isLog || most < 1e-3 ? 1e-3 : 0; // one notation for all labels of an axis
  const labels = ticks.map((tick) => digits(Math.abs(tick) < spacing * 1e-6 ? 0 : tick, precision, least));
  const margin = 12 + 7 * Math.max(...labels.map((label) => label.length));
  const x = (value) => margin + ((width - margin - RIGHT) * (value - left)) / (right - left);
  const lifted = isLog ? Math.log : (value) => value, top = lifted(high), room = top - lifted(low);
  const y = (value) => Math.max(TOP - 4, TOP + ((HEIGHT - TOP - BOTTOM) * (top - lifted(value))) / room);
  const parts = [];
  ticks.forEach((tick, at) => {
    const place = y(tick * scale).toFixed(1);
    parts.push(draw("line", { class: "grid", x1: margin, x2: width - RIGHT, y1: place, y2: place }));
    parts.push(draw("text", { x: margin - 6, y: Number(place) + 4, "text-anchor": "end" }, labels[at]));
  });
  if (name) parts.push(draw("text", { x: 0, y: 11, class: "unit" }, name));
  if (peak > high) parts.push(draw("text", { x: margin + 4, y: 11 }, `peaks cut off, up to ${words(peak, unit)}`));
  const wholes = ticksOf(left, right, Math.max(3, Math.floor((width - margin) / 130))).filter(Number.isInteger);
  for (const tick of wholes) {
    const place = x(tick), near = place > width - 30 ? "end" : "middle";
    const shown = tick.toLocaleString("en");
    parts.push(draw("text", { x: near === "end" ? width - RIGHT : place, y: HEIGHT - 10, "text-anchor": near }, shown));
    parts.push(draw("line", { class: "axis", x1: place, x2: place, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
  }
  parts.push(draw("line", { class: "axis", x1: margin, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  parts.push(draw("text", { x: width - RIGHT, y: 11, "text-anchor": "end" }, isLog ? "by step, log scale" : "by step"));
  return { width, margin, x, y, parts, left, right };
}

function pathOf(xs, ys, x, y) {
  let path = "", pen = "M";
  for (let at = 0; at < xs.length; at += 1) {
    if (ys[at] === null || ys[at] === undefined) { pen = "M"; continue; }
    path += `${pen}${x(xs[at]).toFixed(1)} ${y(ys[at]).toFixed(1)}`;
    pen = "L";
    const alone = (at === 0 || ys[at - 1] === null) && (at + 1 >= xs.length || ys[at + 1] === null);
    if (alone) path += "h0.1";
  }
  return path;
}

// A filled shape between two rows of values; where one is missing there is none.
function areaPath(xs, lows, highs, x, y) {
  let path = "", from = 0;
  for (let at = 0; at <= xs.length; at += 1) {
    if (at < xs.length && highs[at] !== null && lows[at] !== null) continue;
    if (at - from > 0) {
      const there = [], back = [];
      for (let one = from; one < at; one += 1) {
        there.push(`${x(xs[one]).toFixed(1)} ${y(highs[one]).toFixed(1)}`);
        back.unshift(`${x(xs[one]).toFixed(1)} ${y(lows[one]).toFixed(1)}`);
      }
      path += `M${there.join("L")}L${back.join("L")}Z`;
    }
    from = at + 1;
  }
  return path;
}

// What of a line, or of areas, is among the steps that are shown; all of it where nothing is.
function seen(xs, lists) {
  const from = xs.findIndex((step) => step >= view.from), end = xs.findIndex((step) => step > view.to);
  const until = end < 0 ? xs.length : end;
  return from < 0 || until - from < 1 ? [xs, ...lists] : [xs, ...lists].map((list) => list?.slice(from, until));
}

const isSmoothed = (line) => view.smoothing > 0 && line.y.length > 80;

// lines: [{ name, colour, dash, x, y, low, high }], with `smooths` pale below the means of neighbouring values.
function drawLines(node, whole) {
  const lines = whole.lines.map((line) => {
    const mean = whole.smooths && isSmoothed(line) ? smoothed(line.y) : undefined;
    const [x, y, low, high, smooth] = seen(line.x, [line.y, line.low, line.high, mean]);
    return { ...line, x, y, low, high, smooth };
  });
  const chart = { ...whole, lines };
  const all = chart.lines.flatMap((line) => (line.low ? [line.y, line.low, line.high] : [line.y]));
  const at = frame(node, chart, chart.lines.map((line) => line.x), all);
  for (const line of chart.lines) {
    if (line.low) at.parts.push(draw("path", { class: "band", fill: line.colour, d: areaPath(line.x, line.low, line.high, at.x, at.y) }));
    if (line.smooth) at.parts.push(draw("path", { class: "curve raw", stroke: line.colour, d: pathOf(line.x, line.y, at.x, at.y) }));
    const shown = line.smooth ?? line.y;
    at.parts.push(draw("path", { class: "curve", stroke: line.colour, "stroke-dasharray": line.dash ?? "", d: pathOf(line.x, shown, at.x, at.y) }));
  }
  finish(node, chart, at);
}

// areas: [{ name, colour, y }] over one x, one above the other.
function drawAreas(node, whole) {
  const cut = (part) => ({ ...part, y: seen(whole.x, [part.y])[1] });
  const chart = { ...whole, x: seen(whole.x, [])[0], areas: whole.areas.map(cut), lines: (whole.lines ?? []).map(cut) };
  const tops = [];
  let below = chart.x.map(() => 0);
  for (const area of chart.areas) {
    const top = below.map((value, at) => value + (area.y[at] ?? 0));
    tops.push([below, top]);
    below = top;
  }
  const extra = (chart.lines ?? []).map((line) => line.y);
  const at = frame(node, { ...chart, fromZero: true }, [chart.x], [below, ...extra]);
  chart.areas.forEach((area, one) => {
    const xs = chart.x.length > 1 ? chart.x : [at.left, at.right];
    const [low, high] = chart.x.length > 1 ? tops[one] : tops[one].map((list) => [list[0], list[0]]);
    at.parts.push(draw("path", { fill: area.colour, d: areaPath(xs, low, high, at.x, at.y) }));
  });
  for (const line of chart.lines ?? []) {
    at.parts.push(draw("path", { class: "curve", stroke: line.colour, "stroke-dasharray": line.dash ?? "", d: pathOf(chart.x, line.y, at.x, at.y) }));
  }
  finish(node, chart, at);
}

function finish(node, chart, at) {
  for (const mark of chart.marks ?? []) {
    if (mark.step < at.left || mark.step > at.right) continue;
    const tick = draw("line", { class: mark.kind, x1: at.x(mark.step), x2: at.x(mark.step), y1: TOP, y2: TOP + 10 });
    tick.append(draw("title", {}, `step ${mark.step}: ${mark.text}`));
    at.parts.push(tick);
  }
  node.replaceChildren(...at.parts);
  node.place = at;
}

// The index of the value that stands nearest to a step.
function nearest(xs, step) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle; else high = middle;
  }
  return high < 0 ? -1 : Math.abs(xs[low] - step) <= Math.abs(xs[high] - step) ? low : high;
}
