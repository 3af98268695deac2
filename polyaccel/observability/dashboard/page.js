// The page: the records of runs become cards. What a run has no records of is left out.

const PHASES = ["data", "forward", "backward", "reduce", "update", "publish", "other", "outside"];
const PHASE_HELP = {
  data: "waiting for the next micro-batch", forward: "the forward pass", backward: "the backward pass without its reductions",
  reduce: "starting and awaiting the reductions of gradients", update: "the optimizer's update", publish: "making the updated parameters visible: all-gather, copies to the device",
  other: "the rest of the step inside the engine", outside: "the script's own time between steps",
};
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const ASK_MS = 1000;
const cards = new Cards(make("div", { class: "cards" }));

const partColour = (at) => `var(--part${at % 10})`;
const CALLS = ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send", "recv", "barrier", "all_gather_object"];
const callColour = (name) => partColour(CALLS.includes(name) ? CALLS.indexOf(name) + 1 : 0);
const phaseColour = (name) => partColour(PHASES.includes(name) ? PHASES.indexOf(name) : 8 + (name.length % 2));
const has = (list) => list !== undefined && list.some((value) => value !== null);
const last = (list) => (list ?? []).reduce((found, value) => (value === null ? found : value), null);

// A line of each run for each of some figures: runs differ by colour, figures of one run by dashes.
function lineChart(runs, key, title, names, { unit = "", fromZero = false, from = "figures", marks = false, smooths = false, cuts = false, note = "", events = [] } = {}) {
  const lines = [];
  runs.forEach((run, at) => {
    const sources = [...names.map((one) => [run[from], ...one]), ...events.map((one) => [run.events, ...one])];
    sources.forEach(([series, name, said], which) => {
      if (!has(series.figures[name])) return;
      const shown = runs.length > 1 ? `${runLetter(at)}${sources.length > 1 ? " " + said : ""}` : said;
      const line = { name: shown, colour: runColour(at), dash: DASHES[which % 4], x: series.step, y: series.figures[name] };
      if (series.low) { line.low = series.low[name]; line.high = series.high[name]; }
      lines.push(line);
    });
  });
  if (!lines.length) return;
  const marked = marks ? runs.flatMap((run) => [...run.marks.map((mark) => ({ ...mark, kind: "mark" })),
    ...run.alarms.map((alarm) => ({ ...alarm, kind: "alarm" }))]) : [];
  const ticks = [marked.some((mark) => mark.kind === "mark") ? "red: not finite, or skipped" : "", marked.some((mark) => mark.kind === "alarm") ? "amber: alarms" : ""];
  const said = [note, ticks.filter((one) => one).join(", ")].filter((one) => one).join("; ");
  cards.chart(key, title, { unit, fromZero, smooths, cuts, lines, marks: marked }, { note: said });
}

function areaChart(run, at, several, key, title, parts, { unit, note = "", lines = [] }) {
  const x = run.figures.step;
  const areas = parts.filter((part) => has(part.y) && part.y.some((value) => value > 0));
  if (!areas.length) return;
  cards.chart(`${key}.${at}`, title, { unit, x, areas, cuts: unit === "s", lines: lines.filter((line) => has(line.y)) }, { note, run: several ? at : null });
}

// The figures `before/NAME` (and `before/NAME/last`) of a run, as parts of an area.
function partsOf(run, before, end = "", colour = null, order = []) {
  const names = Object.keys(run.figures.figures).filter((name) => name.startsWith(before + "/") && name.endsWith(end));
  const short = (name) => name.slice(before.length + 1, end ? -end.length : undefined);
  names.sort((one, other) => order.indexOf(short(one)) - order.indexOf(short(other)));
  return names.map((name, at) => ({ name: short(name), help: before.endsWith("phase_s") ? PHASE_HELP[short(name)] : undefined, colour: colour ? colour(short(name)) : partColour(at + 1), y: run.figures.figures[name] }));
}

function byRank(run, at, several, key, title, name, options) {
  const lines = Object.entries(run.ranks).filter(([, series]) => has(series.figures[name])).map(([rank, series]) => ({
    name: `rank ${rank}`, colour: rankColour(Number(rank)), x: series.step, y: series.figures[name],
  }));
  if (lines.length > 1) cards.chart(`${key}.${at}`, title, { ...options, lines }, { note: options.note, run: several ? at : null });
}

const IN_USE = "in use", REST = "activations and the rest";
const PURPOSES = ["parameters", "master weights", "optimizer states", "gradients", "gradient buckets in flight", "gathered parameters",
  "second copies for near ranks", "staging of offloaded states"];
const isElsewhere = (name) => / \(\w+\)$/.test(name);
const purposeColour = (name) => partColour(PURPOSES.indexOf(name.replace(/ \(\w+\)$/, "")) + 1);
const purposesOf = (run) => partsOf(run, "memory_nbytes", "", purposeColour, PURPOSES).filter((part) => part.name !== IN_USE);

// What was estimated of the purposes of some names, as its own dashed line.
function plannedOf(run, said, chosen) {
  const planned = Object.entries(run.planned).filter(([name]) => chosen(name));
  const sum = planned.reduce((total, [, nbytes]) => total + nbytes, 0);
  return planned.length ? [{ name: said, colour: "var(--ink)", dash: "2 3", y: run.figures.step.map(() => sum) }] : [];
}

function showMemory(run, at, several) {
  const areas = purposesOf(run).filter((part) => !isElsewhere(part.name));
  const inUse = run.figures.figures[`memory_nbytes/${IN_USE}`];
  if (!areas.length) return;
  if (inUse) areas.push({ name: REST, colour: partColour(9), y: inUse.map((value, one) => (value === null ? null : Math.max(0, value - areas.reduce((sum, part) => sum + (part.y[one] ?? 0), 0)))) });
  const lines = [{ name: "the most in use", colour: "var(--ink)", dash: "7 4", y: run.figures.figures.peak_memory_nbytes ?? [] }, ...plannedOf(run, "estimated, activations apart", (name) => !isElsewhere(name))];
  areaChart(run, at, several, "purposes", "Memory by purpose", areas, { unit: "B", note: "of rank 0's device, at the end of a step", lines });
}

function showTiers(run, at, several) {
  const areas = purposesOf(run).filter((part) => isElsewhere(part.name));
  areaChart(run, at, several, "tiers", "Tiers", areas, { unit: "B", note: "what rank 0 has outside its device", lines: plannedOf(run, "estimated", isElsewhere) });
}

function showTransfers(run, at, several) {
  if (!run.trace?.tiers.length) return;
  const rows = run.trace.tiers.map(([rank, tier, nbytes, seconds]) => [rankName(rank), tier, words(nbytes / run.trace.steps, "B"), words(seconds / run.trace.steps, "s")]);
  cards.holding(`transfers.${at}`, "Transfers of tiers, traced", { run: several ? at : null, note: "a step" }, table(["", "tier", "moved", "waited for"], rows));
}

const WAITING = "in collectives, a step; the others wait for the rank that waits least";

function showWaits(run, at, several) {
  if (!run.waits) return;
  const { pairs, steps } = run.waits, options = { run: several ? at : null };
  const ranks = [...new Set(pairs.flatMap((pair) => pair.slice(0, 2)))].sort((one, other) => one - other);
  options.note = `a step, on the average of ${steps.toLocaleString("en")}: what a rank waits longer than the one that waits least`;
  if (ranks.length <= 8) return cards.holding(`waits.${at}`, "Who waits for whom", options, waitMatrix(pairs, steps));
  const waited = ranks.map((rank) => [`rank ${rank}`, pairs.filter((pair) => pair[1] === rank).reduce((sum, pair) => sum + pair[2], 0) / steps]);
  return held(`waits.${at}`, "For whom the others wait", options, bars(waited, "s", (one) => rankColour(ranks[one])));
}

function showTotals(run, at, several) {
  const ranks = Object.keys(run.totals).map(Number);
  if (ranks.length < 2 || ranks.length > 64) return;
  const rows = ranks.map((rank) => {
    const totals = run.totals[rank], shown = run.ranks[rank].figures;
    const share = totals.seconds ? `${digits((100 * totals.waited_s) / totals.seconds, 3)} %` : "–";
    return [rankName(rank), words(totals.seconds / totals.steps, "s"), share, words(totals.sent_nbytes / totals.steps, "B"), words(last(shown.peak_memory_nbytes), "B")];
  });
  cards.holding(`ranks.${at}`, "Ranks", { run: several ? at : null, note: `means of ${run.totals[0]?.steps.toLocaleString("en") ?? "all"} steps` }, table(["", "a step", "waiting", "sent a step", "memory"], rows));
}

// A card around a picture that is drawn at the width that it gets.
function held(key, title, options, node, { before = [], after = [] } = {}) {
  cards.holding(key, title, options, ...before, node, ...after);
  cards.resized.observe(node);
  requestAnimationFrame(node.redraw);
}

function showTrace(run, at, several) {
  if (!run.trace) return;
  const options = { wide: true, run: several ? at : null };
  const found = [...new Set(run.trace.rows.flatMap((row) => row.spans.map((span) => span[0])))];
  const names = [...PHASES.filter((name) => found.includes(name)), ...found.filter((name) => !PHASES.includes(name) && name !== "waiting")];
  const legend = make("ul", { class: "legend" }, ...names.map((name) => make("li", {}, swatch({ colour: phaseColour(name), filled: true }), name)),
    make("li", {}, swatch({ colour: "var(--error)", filled: true }), run.trace.tiers.length ? "waiting for ranks or tiers" : "waiting for ranks"));
  const node = lanes(run.trace, phaseColour);
  held(`trace.${at}`, `${run.trace.steps} traced steps`, { ...options, note: "what every rank did, on one clock; trace.json has all of it for ui.perfetto.dev" }, node, {
    before: [legend], after: [make("details", {}, make("summary", {}, "Where the time went"), make("pre", {}, run.trace.report))],
  });
}

function showTracedWaits(run, at, several) {
  if (run.trace?.pairs.length && new Set(run.trace.pairs.flatMap((pair) => pair.slice(0, 2))).size <= 16)
    cards.holding(`trace-waits.${at}`, "Who waited for whom, traced", { note: "a step: at each meeting all wait for the rank that comes last", run: several ? at : null }, waitMatrix(run.trace.pairs, run.trace.steps));
}

function showBalance(run, at, several) {
  const lines = Object.keys(run.experts).map((layer, which) => ({ name: layer, colour: partColour(which + 1), dash: DASHES[Math.floor(which / 9) % 4], x: run.figures.step, y: run.figures.figures[`experts/${layer}/balance`] ?? [] })).filter((line) => has(line.y));
  if (lines.length) cards.chart(`balance.${at}`, "Balance of experts", { unit: "", fromZero: true, smooths: true, lines }, { note: "most tokens of an expert over the mean; 1 is even", run: several ? at : null });
}

function showTokens(runs, several) {
  const layers = [...new Set(runs.flatMap((run) => Object.keys(run.experts)))];
  layers.slice(0, 8).forEach((layer, which) => runs.forEach((run, at) => {
    const rows = (run.experts[layer] ?? []).map((tokens, expert) => [`${expert}`, tokens]);
    if (rows.length) held(`experts.${at}.${layer}`, `Tokens by expert, ${layer}`, { note: "in the last step, of all ranks", run: several ? at : null }, bars(rows, "", () => partColour(which + 1)));
  }));
}

function showPictures(run, at, several) {
  const titles = { "pipeline.svg": "The pipeline's table", "flops_profile.svg": "Where the operations are" };
  for (const [name, text] of Object.entries(run.pictures)) {
    const image = make("img", { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`, alt: titles[name] ?? name, tabindex: "0" });
    cards.holding(`picture.${at}.${name}`, titles[name] ?? name, { wide: true, run: several ? at : null }, make("div", { class: "picture" }, image));
  }
}

function showLog(run, at, several) {
  const options = { run: several ? at : null, wide: !several };
  if (run.log.length || run.alarms.length) cards.holding(`log.${at}`, "Log and alarms", options, logLines(run.log, run.alarms));
}

function showConfig(run, at, several) {
  const options = { run: several ? at : null, wide: !several };
  if (run.facts.config) cards.holding(`config.${at}`, "Config", options, make("details", {}, make("summary", {}, "as it was asked for, with packages"), make("pre", {}, JSON.stringify(run.facts, null, 2))));
}

function headOf(run, at, several) {
  const facts = run.facts, config = facts.config ?? {};
  const said = [];
  if (facts.ranks) said.push(`${facts.ranks} rank${facts.ranks > 1 ? "s" : ""}`);
  if (config.zero_optimization?.stage !== undefined) said.push(`ZeRO stage ${config.zero_optimization.stage}`);
  for (const type of ["fp16", "bf16"]) if (config[type]?.enabled) said.push(type);
  for (const [axis, size] of Object.entries(facts.mesh ?? {})) if (axis !== "data" && size > 1) said.push(`${axis} ${size}`);
  if (facts.plugins?.accelerator) said.push(facts.plugins.accelerator.split(" ")[0]);
  if (facts.started) said.push(`started ${new Date(facts.started).toLocaleString("en-GB")}`);
  if (run.unread) said.push(`${run.unread} lines could not be read`);
  const title = make("h2", {}, ...(several ? [badge(at)] : []), run.name);
  if (run.state) title.append(make("span", { class: `state ${run.state}` }, run.state));
  const figures = run.last.figures;
  const tiles = [["step", run.last.step, ""], ["loss", figures.loss, ""], ["samples/s", figures.samples_per_s, ""],
    ["tokens/s", figures.tokens_per_s, ""], ["a step", figures.step_time_s, "s"], ["memory, rank 0", figures.peak_memory_nbytes, "B"],
    ["TFLOPS a rank", figures.tflops, ""]];
  const shown = tiles.filter((tile) => tile[1] !== undefined && tile[1] !== null).map(([name, value, unit]) => make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, name === "step" ? value.toLocaleString("en") : words(value, unit))));
  return make("div", { class: "head" }, title, make("p", {}, said.join(" · ")), make("dl", { class: "tiles" }, ...shown));
}

// A tag as a person writes it: "validation_loss" without its underscore.
const wordsOf = (tag) => tag.replaceAll("_", " ");

// A row for each of several runs: its last figures.
function showComparison(runs, losses) {
  if (runs.length < 2) return;
  const columns = [["loss", "loss", ""], ["step_time_s", "a step", "s"], ["tokens_per_s", "tokens/s", ""], ["samples_per_s", "samples/s", ""], ["peak_memory_nbytes", "memory, rank 0", "B"]];
  const shown = columns.filter(([name]) => runs.some((run) => has(run.figures.figures[name])));
  const rows = runs.map((run, at) => [badge(at), run.last.step.toLocaleString("en"), ...losses.map((tag) => words(last(run.events.figures[tag]), "")),
    ...shown.map(([name, , unit]) => words(last(run.figures.figures[name]), unit))]);
  cards.holding("comparison", "Runs compared", { wide: true, note: "their last figures" }, table(["", "step", ...losses.map(wordsOf), ...shown.map((one) => one[1])], rows));
}

function chooseSteps(from, to) {
  [view.from, view.to] = [from, to];
  document.getElementById("whole").hidden = from === -Infinity;
  cards.redrawAll();
}

function listen() {
  const choice = (id) => document.getElementById(id);
  choice("smoothing").addEventListener("input", (event) => { view.smoothing = Number(event.target.value); cards.redrawAll(); });
  choice("log").addEventListener("change", (event) => { view.log = event.target.checked; cards.redrawAll(); });
  choice("whole").addEventListener("click", () => chooseSteps(-Infinity, Infinity));
}

function show(runs) {
  const several = runs.length > 1, main = document.getElementById("runs");
  const heads = runs.map((run, at) => headOf(run, at, several));
  for (const old of main.querySelectorAll(".head, noscript")) old.remove();
  main.prepend(...heads);
  if (!cards.place.isConnected) main.append(cards.place);
  document.title = `${runs.map((run) => run.name).join(", ")} – polyaccel`;
  cards.begin();
  const thinned = runs.some((run) => run.figures.low) ? "; shaded: from the least to the greatest" : "";
  const noisy = { smooths: true, note: runs.some((run) => run.figures.step.length > 80) ? `bold: smoothed${thinned}` : "" };
  const tags = [...new Set(runs.flatMap((run) => Object.keys(run.events.figures)))], losses = tags.filter((tag) => /(^|[_/ ])loss$/i.test(tag));
  showComparison(runs, losses);
  lineChart(runs, "loss", "Loss", [["loss", "training"]], { marks: true, ...noisy, events: losses.map((tag) => [tag, wordsOf(tag)]) });
  lineChart(runs, "norm", "Gradient norm", [["grad_norm", "before clipping"], ["grad_norm_clipped", "after clipping"]], { fromZero: true, marks: true, cuts: true, ...noisy });
  if (runs.some((run) => (run.figures.figures.loss_scale ?? []).some((value) => value !== null && value !== 1))) lineChart(runs, "scale", "Loss scale", [["loss_scale", "loss scale"]], { fromZero: true, marks: true });
  const groups = [...new Set(runs.flatMap((run) => Object.keys(run.figures.figures).filter((name) => /^lr(_\d+)?$/.test(name))))];
  const isOne = runs.every((run) => groups.every((name) => JSON.stringify(run.figures.figures[name]) === JSON.stringify(run.figures.figures.lr)));
  lineChart(runs, "lr", "Learning rate", isOne ? [["lr", "learning rate"]] : groups.map((name, at) => [name, `group ${at}`]), { fromZero: true });
  lineChart(runs, "tokens", "Tokens a second", [["tokens_per_s", "of all ranks"]], { fromZero: true, ...noisy });
  if (!runs.every((run) => has(run.figures.figures.tokens_per_s))) lineChart(runs, "samples", "Samples a second", [["samples_per_s", "of all ranks"]], { fromZero: true, ...noisy });
  lineChart(runs, "flops", "Operations", [["tflops", "TFLOPS a rank"]], { fromZero: true, ...noisy });
  lineChart(runs, "mfu", "Utilisation", [["model_flops_utilisation", "of a large product's rate"]], { fromZero: true, ...noisy });
  for (const tag of tags.filter((one) => !losses.includes(one)).slice(0, 24)) lineChart(runs, `event.${tag}`, wordsOf(tag), [[tag, wordsOf(tag)]], { from: "events" });
  cards.place.className = `cards${several ? ` several of${Math.min(runs.length, 3)}` : ""}`;
  const each = (one) => runs.forEach((run, at) => one(run, at, several));
  each((run, at) => areaChart(run, at, several, "phases", "Time of a step by phase", partsOf(run, "phase_s", "", phaseColour, PHASES), { unit: "s", note: "of rank 0's host" }));
  each((run, at) => areaChart(run, at, several, "device-phases", "Time of the device by phase", partsOf(run, "device_phase_s", "", phaseColour, PHASES), { unit: "s", note: "of rank 0's device, a step" }));
  each(showMemory);
  each(showTiers);
  if (!runs.some((run) => Object.keys(run.ranks).length > 1 || purposesOf(run).length)) lineChart(runs, "memory", "Memory", [["peak_memory_nbytes", "most in use"]], { unit: "B", fromZero: true });
  each((run, at) => areaChart(run, at, several, "waits-by-call", "Waiting by collective", partsOf(run, "collectives", "/waited_s", callColour, CALLS), { unit: "s", note: "of rank 0, a step" }));
  each((run, at) => areaChart(run, at, several, "sent-by-call", "Sent by collective", partsOf(run, "collectives", "/sent_nbytes", callColour, CALLS), { unit: "B", note: "by rank 0, a step" }));
  each((run, at) => byRank(run, at, several, "rank-waits", "Waiting by rank", "waited_s", { unit: "s", fromZero: true, cuts: true, smooths: true, note: WAITING }));
  each(showWaits);
  each((run, at) => byRank(run, at, several, "rank-times", "Step time by rank", "step_time_s", { unit: "s", fromZero: true, cuts: true, smooths: true }));
  each((run, at) => byRank(run, at, several, "rank-memory", "Memory by rank", "peak_memory_nbytes", { unit: "B", fromZero: true, note: "the most in use on each device so far" }));
  each(showTotals);
  each(showTransfers);
  each(showBalance);
  showTokens(runs, several);
  each(showTrace);
  each(showTracedWaits);
  each(showPictures);
  each(showLog);
  each(showConfig);
  cards.end();
}

async function follow() {
  const news = document.getElementById("news");
  let have = "", waits = ASK_MS;
  for (;;) {
    try {
      const reply = await fetch(`news?have=${have}`, { cache: "no-store" });
      if (!reply.ok) throw new Error(String(reply.status));
      const state = await reply.json();
      if (state.runs) {
        have = state.revision;
        const began = performance.now();
        show(state.runs);
        waits = Math.max(ASK_MS, 10 * (performance.now() - began)); // a large page is drawn less often
      }
      news.textContent = `live, looked at ${new Date().toLocaleTimeString("en-GB")}`;
      news.className = "";
      document.body.dataset.revision = have;
    } catch (error) {
      news.textContent = "polyaccel watch has ended: this is its last state";
      news.className = "lost";
    }
    await new Promise((done) => setTimeout(done, waits));
  }
}

listen();
const { runs } = JSON.parse(document.getElementById("data").textContent);
if (runs === null) follow();
else { show(runs); document.getElementById("news").textContent = "as it was when this file was written"; }
