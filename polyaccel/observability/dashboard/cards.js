// Cards: a title, a note, and a chart, a table, a picture or lines of text. They are kept between two looks at the runs.

const rankColour = (rank) => (rank < 8 ? `var(--rank${rank})` : `hsl(${Math.round(rank * 137.508) % 360} 60% var(--rank-light))`);
const runColour = (run) => `var(--run${run % 6})`;
const runLetter = (run) => String.fromCharCode(65 + (run % 26));

class Cards {
  constructor(place) {
    this.place = place;
    this.known = new Map();
    this.resized = new ResizeObserver((entries) => {
      for (const { target } of entries) if (target.redraw && target.clientWidth !== target.drawnAt) target.redraw();
    });
  }

  begin() { this.seen = []; }

  // Cards that were not asked for this time go away; the others stand in the order in which they were.
  end() {
    for (const [key, card] of this.known) {
      if (this.seen.includes(card)) continue;
      card.remove();
      this.known.delete(key);
    }
    this.seen.forEach((card, at) => {
      if (this.place.children[at] !== card) this.place.insertBefore(card, this.place.children[at] ?? null);
    });
  }

  card(key, title, { note = "", wide = false, run = null } = {}) {
    let card = this.known.get(key);
    if (!card) {
      card = make("section", { class: "card", "data-card": key }, make("h3"), make("p", { class: "note" }));
      this.known.set(key, card);
    }
    card.classList.toggle("wide", wide);
    card.classList.toggle("first", run === 0);
    const [head, said] = card.children;
    head.replaceChildren(...(run === null ? [] : [badge(run)]), title);
    said.textContent = note;
    said.hidden = note === "";
    this.seen.push(card);
    return card;
  }

  // A card whose one part below title and note is made again.
  holding(key, title, options, ...parts) {
    const card = this.card(key, title, options);
    const scrolls = card.querySelector(".log, .scroll");
    const [top, left] = scrolls ? [scrolls.scrollTop, scrolls.scrollLeft] : [0, 0];
    const isOpen = card.querySelector("details")?.open;
    while (card.children.length > 2) card.lastChild.remove();
    card.append(...parts);
    if (isOpen) card.querySelector("details").open = true;
    const again = card.querySelector(".log, .scroll");
    if (again) [again.scrollTop, again.scrollLeft] = [top, left];
  }

  chart(key, title, chart, options = {}) {
    const card = this.card(key, title, options);
    if (!card.chart) {
      card.legend = make("ul", { class: "legend" });
      card.chart = draw("svg", { class: "chart", role: "img" });
      card.append(card.legend, card.chart);
      card.chart.addEventListener("pointermove", (event) => this.point(card, event.offsetX));
      card.chart.addEventListener("pointerleave", () => this.point(card, null));
      card.chart.addEventListener("pointerdown", (event) => { card.from = this.stepAt(card, event.offsetX); });
      card.chart.addEventListener("pointerup", (event) => this.zoom(card, this.stepAt(card, event.offsetX)));
      card.chart.addEventListener("dblclick", () => chooseSteps(-Infinity, Infinity));
      card.chart.redraw = () => this.redraw(card);
      this.resized.observe(card.chart);
    }
    card.content = chart;
    card.chart.setAttribute("aria-label", `${title}: ${(chart.areas ?? chart.lines).map((one) => one.name).join(", ")}`);
    this.redraw(card);
  }

  redraw(card) {
    if (!card.isConnected) { requestAnimationFrame(() => card.isConnected && this.redraw(card)); return; }
    card.chart.drawnAt = card.chart.clientWidth;
    (card.content.areas ? drawAreas : drawLines)(card.chart, card.content);
    this.legend(card, null);
  }

  // The values at a step, or the last ones.
  legend(card, step) {
    const chart = card.content;
    const parts = [...(chart.areas ?? []).map((one) => ({ ...one, x: chart.x, filled: true })).reverse(),
      ...(chart.lines ?? []).map((one) => ({ x: chart.x, ...one }))];
    const shown = parts.length > 18 ? [] : parts;
    const items = shown.map((one) => {
      let at = step === null ? one.y.length - 1 : nearest(one.x, step);
      while (step === null && at > 0 && one.y[at] === null) at -= 1;
      return make("li", one.help ? { title: one.help, class: "helped" } : {}, swatch(one), make("span", {}, one.name), make("b", {}, words(one.y[at], chart.unit)));
    });
    if (shown.length < parts.length) items.push(make("li", {}, `${parts.length} curves, one colour per rank`));
    const xs = parts[0].x;
    if (step !== null) items.unshift(make("li", {}, make("b", {}, `step ${digits(xs[nearest(xs, step)], 9)}`)));
    else if (parts.length) items.unshift(make("li", {}, "last"));
    card.legend.replaceChildren(...items);
  }

  // The step at a place of a chart; null outside of its axes.
  stepAt(card, offset) {
    const at = card.chart.place;
    if (!at) return null;
    const step = at.left + ((offset - at.margin) / (at.width - at.margin - RIGHT)) * (at.right - at.left);
    return step < at.left || step > at.right ? null : step;
  }

  // All charts show the steps over which the pointer was drawn, unless these are hardly any.
  zoom(card, to) {
    const { left, right } = card.chart.place ?? {}, from = card.from ?? null;
    card.from = null;
    if (from !== null && to !== null && Math.abs(to - from) > (right - left) / 30) chooseSteps(Math.min(from, to), Math.max(from, to));
  }

  redrawAll() {
    for (const card of this.known.values()) if (card.chart) this.redraw(card);
  }

  point(card, offset) {
    card.chart.querySelector(".cross")?.remove();
    const step = offset === null ? null : this.stepAt(card, offset);
    if (step === null) return this.legend(card, null);
    card.chart.append(draw("line", { class: "cross", x1: offset, x2: offset, y1: TOP, y2: HEIGHT - BOTTOM }));
    return this.legend(card, step);
  }
}

function badge(run) {
  const node = make("span", { class: "badge" }, runLetter(run));
  node.style.setProperty("--run", runColour(run));
  return node;
}

function swatch({ colour, dash, filled }) {
  const node = draw("svg", { width: 16, height: 10, "aria-hidden": "true" });
  if (filled) node.append(draw("rect", { width: 12, height: 10, x: 2, rx: 2, fill: colour }));
  else node.append(draw("line", { x1: 0, x2: 16, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash ?? "" }));
  return node;
}

function rankName(rank) {
  const dot = make("span", { class: "dot" });
  dot.style.background = rankColour(rank);
  return make("span", { class: "rank" }, dot, `rank ${rank}`);
}

function table(head, rows) {
  const cells = (kind, row) => row.map((cell) => make(kind, {}, cell));
  return make("div", { class: "scroll", tabindex: "0" }, make("table", {},
    make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row))))));
}

// A row for each waiting rank, a column for each rank that it waits for; the longest waits are bold.
function waitMatrix(pairs, each) {
  const ranks = [...new Set(pairs.flatMap(([one, other]) => [one, other]))].sort((one, other) => one - other);
  const most = Math.max(...pairs.map((pair) => pair[2]));
  const [scale, unit] = scaleOf("s", most / each);
  const of = new Map(pairs.map(([one, other, seconds]) => [`${one}.${other}`, seconds]));
  const rows = ranks.map((rank) => [rankName(rank), ...ranks.map((other) => {
    const seconds = of.get(`${rank}.${other}`);
    const cell = make("span", {}, rank === other || !seconds ? "·" : digits(seconds / each / scale, 3));
    if (seconds > 0.6 * most) cell.style.fontWeight = "700";
    return cell;
  })]);
  return table([`${unit} for`, ...ranks.map((rank) => rankName(rank))], rows);
}

// Bars over one row each: who had how much of something.
function bars(rows, unit, colourOf) {
  const most = Math.max(...rows.map((row) => row[1]), 1e-12);
  const node = draw("svg", { class: "chart", role: "img" });
  const named = rows.length <= 24;
  const height = named ? 20 : Math.max(2, Math.floor(360 / rows.length));
  node.redraw = () => {
    const width = Math.max(240, node.clientWidth || 380), left = named ? 12 + 7 * Math.max(...rows.map((row) => String(row[0]).length)) : 0;
    node.drawnAt = node.clientWidth;
    node.setAttribute("viewBox", `0 0 ${width} ${rows.length * height + 4}`);
    node.setAttribute("height", rows.length * height + 4);
    node.replaceChildren(...rows.flatMap(([name, value], at) => {
      const length = ((width - left - 90) * value) / most;
      const bar = draw("rect", { x: left, y: at * height + 3, width: Math.max(1, length).toFixed(1), height: Math.max(1, height - (named ? 6 : 1)), fill: colourOf(at), rx: named ? 2 : 0 });
      bar.append(draw("title", {}, `${name}: ${words(value, unit)}`));
      if (!named) return [bar];
      return [bar, draw("text", { x: 0, y: at * height + 15, class: "name" }, name), draw("text", { x: left + length + 6, y: at * height + 15 }, words(value, unit))];
    }));
  };
  return node;
}

// What each rank did in traced steps: phases as bars, and below them when it did nothing but wait.
function lanes(trace, colours) {
  const node = draw("svg", { class: "chart", role: "img" });
  node.redraw = () => {
    const width = Math.max(260, node.clientWidth || 800), left = 62, row = 34, height = trace.rows.length * row + 24;
    node.drawnAt = node.clientWidth;
    node.setAttribute("viewBox", `0 0 ${width} ${height}`);
    node.setAttribute("height", height);
    const [scale, unit] = scaleOf("s", trace.seconds);
    const x = (seconds) => left + ((width - left - RIGHT) * seconds) / trace.seconds;
    const parts = [];
    trace.rows.forEach(({ rank, spans }, at) => {
      const top = at * row + 2;
      parts.push(draw("text", { x: 0, y: top + 15, class: "name" }, `rank ${rank}`), draw("rect", { x: 52, y: top, width: 4, height: 27, fill: rankColour(rank) }));
      for (const [name, begin, length] of spans) {
        const waits = name === "waiting";
        const from = Math.max(left, x(begin)), until = Math.min(width - RIGHT, x(begin + length));
        if (until - from < 0.15) continue;
        const bar = draw("rect", { x: from.toFixed(2), width: (until - from).toFixed(2), y: top + (waits ? 21 : 0), height: waits ? 6 : 20, fill: waits ? "var(--error)" : colours(name) });
        bar.append(draw("title", {}, `rank ${rank}, ${name}: ${words(length, "s")}`));
        parts.push(bar);
      }
    });
    for (const tick of ticksOf(0, trace.seconds / scale, Math.max(2, Math.floor(width / 140)))) {
      const place = Math.min(x(tick * scale), width - RIGHT);
      parts.push(draw("text", { x: place, y: height - 5, "text-anchor": place > width - 50 ? "end" : "middle" }, `${digits(tick)} ${unit}`));
    }
    node.replaceChildren(...parts);
  };
  return node;
}

function logLines(lines, alarms) {
  const list = make("ul", { class: "log", tabindex: "0" });
  const isAlarm = (text) => alarms.some((alarm) => text.includes(alarm.text));
  for (const alarm of [...alarms].reverse().filter((one) => !lines.some((line) => line.text.includes(one.text))))
    list.append(make("li", { class: "alarm" }, make("time", {}, `step ${alarm.step.toLocaleString("en")}`), make("span", {}, alarm.text)));
  for (const line of [...lines].reverse()) {
    const at = new Date(line.time * 1000), others = line.ranks.filter((rank) => rank !== 0);
    const who = others.length ? ` [rank ${line.ranks.join(", ")}]` : "";
    list.append(make("li", { class: isAlarm(line.text) ? "alarm" : line.level }, make("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString("en-GB")), make("span", {}, line.text + who)));
  }
  return list;
}
