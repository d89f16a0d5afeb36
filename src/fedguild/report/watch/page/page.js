// Follows a run, a federation or a folder of runs: takes the board's changes from the server and shows them.
// All text from the run goes through textContent, never through HTML.
"use strict";

const page = document.getElementById("page");
const base = page.dataset.base;
const here = location.pathname.endsWith("/") ? location.pathname : location.pathname + "/";
const parts = { page: new Map(), scores: new Map(), rounds: new Map(), clients: new Map(), rejections: new Map(), log: new Map(), runs: new Map() };
const kept = { log: 400, rejections: 200 };
const dirty = new Set();
const at = (id) => document.getElementById(id);

// ---- elements

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A table's caption, whose text stays in view while the table scrolls.
const captioned = (text) => make("caption", {}, make("span", {}, text));

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- numbers, as fedguild.report.units writes them

const missing = "–";

function si(value, unit) {
  if (value === undefined || value === null) return missing;
  const prefixes = ["", "k", "M", "G", "T", "P", "E"];
  let size = Number(value.toPrecision(3)), step = 0;
  while (Math.abs(size) >= 1000 && step < prefixes.length - 1) { size /= 1000; step += 1; }
  const digits = step === 0 && Number.isInteger(size) ? 0 : Math.max(0, 2 - Math.floor(Math.log10(Math.abs(size))));
  return `${size.toFixed(digits)} ${prefixes[step]}${unit || ""}`.trim();
}

function duration(seconds) {
  if (seconds === undefined || seconds === null) return missing;
  if (seconds < 59.95) return seconds < 1 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(1)} s`;
  if (seconds < 3599.5) {
    const whole = Math.round(seconds);
    return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  }
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

const count = (number) => String(number).replace(/\B(?=(\d{3})+(?!\d))/g, "\u2009");
const countOf = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
const score = (value) => (value === undefined || value === null ? missing : value.toFixed(3));
const signed = (value) => (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(3);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

function ago(seconds) {
  if (seconds === undefined || seconds === null) return missing;
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  return passed < 60 ? `${Math.floor(passed)} s ago` : `${duration(passed)} ago`;
}

// ---- a line chart whose axis shows the trend; drawn at the width it is shown at, so that its text stays readable

function ticks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9), found = [];
  for (let place = first; place <= last; place += 1) found.push(Number((place * step).toPrecision(12)));
  return found;
}

function spreadApart(places, gap, low, high) {
  const order = places.map((_, index) => index).sort((a, b) => places[a] - places[b]);
  const moved = places.slice();
  for (let n = 1; n < order.length; n += 1) moved[order[n]] = Math.max(moved[order[n]], moved[order[n - 1]] + gap);
  if (order.length && moved[order.at(-1)] > high) {
    moved[order.at(-1)] = high;
    for (let n = order.length - 2; n >= 0; n -= 1) moved[order[n]] = Math.min(moved[order[n]], moved[order[n + 1]] - gap);
  }
  return moved.map((place) => Math.max(low, place));
}

// Draws the charts again whose width has changed: by the window, by a neighbour, by a scroll bar.
const drawnAt = new WeakMap();
const resized = new ResizeObserver((entries) => {
  if (entries.some(({ target }) => target.clientWidth !== drawnAt.get(target))) mark("scores", "rounds");
});

function chart(holder, lines, { height, format, label, named, bounds, whole }) {
  const known = lines.filter((line) => line.points.length);
  const width = Math.max(240, holder.clientWidth);
  resized.observe(holder);
  drawnAt.set(holder, holder.clientWidth);
  if (!known.length) { holder.replaceChildren(make("p", { class: "under" }, "Nothing yet.")); return; }
  const all = known.flatMap((line) => line.points);
  const values = all.map((point) => point[1]);
  let low = Math.min(...values), high = Math.max(...values);
  const room = (high - low) * 0.08 || Math.abs(high) * 0.05 || 0.05;
  low -= room; high += room;
  if (whole) { low = 0; high = Math.max(1, high); }
  if (bounds) { low = Math.max(bounds[0], low); high = Math.min(bounds[1], high); }
  if (high <= low) { high = low + (room || 1); }
  const first = Math.min(...all.map((point) => point[0])), last = Math.max(...all.map((point) => point[0]));
  const marks = ticks(low, high, height > 150 ? 5 : 3).filter((mark) => !whole || Number.isInteger(mark));
  const left = 8 + 7 * Math.max(...marks.map((mark) => format(mark).length));
  const ends = named ? known.map((line) => `${line.name} ${format(line.points.at(-1)[1])}`) : [];
  const right = named ? 14 + 6.6 * Math.max(...ends.map((text) => text.length)) : 10;
  const top = 8, bottom = height - 22;
  const x = (round) => left + (last === first ? 0.5 : (round - first) / (last - first)) * (width - left - right);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  for (const mark of marks) {
    svg.append(draw("line", { class: "rule", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    const text = draw("text", { x: left - 6, y: y(mark) + 4, "text-anchor": "end" });
    text.textContent = format(mark);
    svg.append(text);
  }
  for (const mark of ticks(first, last, width > 500 ? 8 : 4)) {
    if (!Number.isInteger(mark)) continue;
    const text = draw("text", { x: x(mark), y: height - 4, "text-anchor": "middle" });
    text.textContent = String(mark);
    svg.append(text);
  }
  const places = named ? spreadApart(known.map((line) => y(line.points.at(-1)[1])), 14, top + 4, bottom) : [];
  known.forEach((line, index) => {
    const ranked = known.filter((other) => !other.mean);
    const colour = line.mean ? "cm" : `c${ranked.length > 1 ? Math.round((ranked.indexOf(line) * 6) / (ranked.length - 1)) : 2}`;
    const path = line.points.map((point, place) => `${place ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
    svg.append(draw("path", { class: colour, d: path.join("") }));
    const end = line.points.at(-1);
    svg.append(draw("circle", { class: colour, cx: x(end[0]), cy: y(end[1]), r: 3 }));
    if (named) {
      const text = draw("text", { class: colour, x: x(end[0]) + 9, y: places[index] + 4 });
      text.textContent = ends[index];
      svg.append(text);
    }
  });
  holder.replaceChildren(svg);
}

function valuesTable(caption, heads, rows) {
  return make("div", { class: "scroll" }, make("table", { class: "numbers" }, captioned(caption),
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell, place) =>
      place ? make("td", {}, cell) : make("th", { scope: "row" }, cell)))))));
}

// A table of a chart's values, written when it is opened.
function values(holder, id, fill) {
  let details = holder.querySelector(`details[data-of="${id}"]`);
  if (!details) {
    details = make("details", { "data-of": id }, make("summary", {}, "Values"), make("div"));
    details.addEventListener("toggle", () => { if (details.open) details.lastChild.replaceChildren(details.fill()); });
    holder.append(details);
  }
  details.fill = fill;
  if (details.open) details.lastChild.replaceChildren(fill());
}

// ---- a run

const words = { waiting: "Waiting", running: "Running", finished: "Finished", stopped: "Stopped", interrupted: "Interrupted", failed: "Failed", gone: "Not running" };
const phases = { train: "training", aggregate: "aggregating", evaluate: "scoring" };
const stateWords = { training: "training", asked: "asked", late: "late", delivered: "delivered", rejected: "rejected", unneeded: "not needed", gone: "gone", idle: "idle" };
const get = (key) => parts.page.get(key) || {};

function showHead() {
  const facts = get("facts"), how = get("standing");
  const kinds = { run: "a run", federation: "a federation", grid: (facts.rows || []).length ? "a comparison" : "a folder of runs", waiting: "waiting" };
  setText(at("kind"), `FedGuild · ${kinds[facts.kind] || ""}`);
  setText(at("title"), facts.name || "FedGuild");
  const total = get("totals");
  const progress = facts.kind === "run" || facts.kind === "federation" ? ` ${total.round || 0}/${facts.rounds}` : "";
  document.title = `${facts.name || "FedGuild"}${progress} · FedGuild`;
  const shown = facts.kind === "grid" ? [facts.folder, countOf(parts.runs.size, "run")] : [
    facts.method && `method ${facts.method}`, facts.model && `model ${facts.model}`, facts.data && `data ${facts.data}`,
    facts.partition, facts.clients ? countOf(facts.clients, "client") : "", facts.rounds ? countOf(facts.rounds, "round") : "",
    facts.seed === null || facts.seed === undefined ? "" : `seed ${facts.seed}`, facts.folder];
  at("facts").replaceChildren(...shown.filter(Boolean).map((fact) => make("span", {}, fact)));
  if (here !== base) at("up").replaceChildren(make("a", { href: base }, "← all runs"));
  const standing = at("standing");
  standing.className = `standing word-${how.word || "waiting"}`;
  standing.hidden = facts.kind === "grid";
  const report = how.word === "finished" || how.word === "stopped" ? make("a", { href: `${here}report` }, "Report") : null;
  const reason = how.reason || (how.word === "running" && how.holder ? how.holder : "");
  standing.replaceChildren(make("strong", {}, words[how.word] || ""), reason, reason && report ? " " : "", report || "");
  at("run").hidden = !(facts.kind === "run" || facts.kind === "federation");
  at("grid").hidden = facts.kind !== "grid";
}

function showProgress() {
  const facts = get("facts"), now = get("now"), total = get("totals"), how = get("standing");
  const rounds = facts.rounds || 0, step = now.step || [];
  const inside = how.word === "running" && now.round > (total.round || 0) ? (now.asked ? now.delivered / now.asked : 0) : 0;
  const done = rounds ? ((total.round || 0) + Math.min(1, inside)) / rounds : 0;
  at("done").style.width = `${(100 * done).toFixed(2)}%`;
  const told = [rounds ? `Round ${Math.max(now.round || 0, total.round || 0)} of ${rounds}` : ""];
  if (how.word === "running") {
    if (now.round > (total.round || 0)) {
      told.push(phases[now.phase] || now.phase);
      if (now.phase === "train" && step.length) told.push(`step ${step[0]} of ${step[1]}${step[2] === null ? "" : `, loss ${step[2].toFixed(3)}`}`);
      if (now.asked) told.push(`${count(now.delivered)} of ${count(now.asked)} clients have answered`);
    } else told.push(now.stage);
    if (total.round_seconds && rounds > (total.round || 0)) {
      const passed = now.started && now.round > total.round ? Date.now() / 1000 - now.started : 0;
      told.push(`about ${duration(Math.max(0, total.round_seconds * (rounds - total.round) - passed))} left`);
    }
  }
  if (total.seconds) told.push(`${duration(total.seconds)} in complete rounds`);
  setText(at("round"), told.filter(Boolean).join(" · "));
}

function headline() {
  for (const split of ["test", "validation"]) for (const name of ["mean", "mtal", "trained", "received"]) {
    const points = parts.scores.get(`summary/${name}/${split}`);
    if (points && points.length) return { name, points };
  }
  const budgets = [...parts.scores].filter(([key, points]) => key.startsWith("budget/") && points.length).map(([, points]) => new Map(points));
  if (!budgets.length) return null;
  const rounds = [...budgets[0].keys()].filter((round) => budgets.every((known) => known.has(round)));
  const points = rounds.map((round) => [round, budgets.reduce((sum, known) => sum + known.get(round), 0) / budgets.length]);
  return points.length ? { name: "mean", points } : null;
}

function metricTitle() {
  const metric = get("facts").metric || "score";
  return metric[0].toUpperCase() + metric.slice(1);
}

function showTiles() {
  const total = get("totals"), mean = headline(), privacy = total.privacy || {};
  const before = mean && mean.points[0][0] === 0 && mean.points.length > 1 ? mean.points[0][1] : null;
  const latest = mean ? mean.points.at(-1)[1] : null;
  const named = { mean: "mean over budgets", mtal: "clients’ own models", trained: "as trained", received: "as received" };
  const tiles = [
    [metricTitle(), score(latest), before === null ? "" : `${signed(latest - before)} since the start`, mean ? named[mean.name] || mean.name : ""],
    ["Sent by clients", si(total.upload_bytes, "B")], ["Sent to clients", si(total.download_bytes, "B")],
    ["Training", si(total.training_flops, "FLOP")], ["Peak memory", si(total.peak_memory_bytes, "B"), "of a cohort"],
    ["Time of a round", duration(total.round_seconds), "mean of the last ten"],
    ["Not aggregated", count(total.rejected || 0), total.late ? `${count(total.late)} came late` : ""],
  ];
  if (privacy.epsilon !== undefined) tiles.push(["Privacy spent", `ε ${privacy.epsilon.toFixed(2)}`, `δ ${privacy.delta} per ${privacy.unit}`]);
  at("tiles").replaceChildren(...tiles.map(([name, value, ...notes]) => make("div", {}, make("dt", {}, name),
    make("dd", {}, value, ...notes.filter(Boolean).map((note) => make("small", {}, note))))));
}

function showScores() {
  const holder = at("scores"), budgets = (get("facts").budgets || []).map((budget) => budget.name);
  const lines = [];
  for (const scope of ["budget", "summary"]) for (const split of ["test", "validation"]) {
    for (const [key, points] of parts.scores) {
      const [of, ...rest] = key.split("/"), name = rest.slice(0, -1).join("/");
      if (of === scope && rest.at(-1) === split) lines.push({ name, split, points, mean: scope === "summary" });
    }
    if (lines.length) break;
  }
  lines.sort((a, b) => a.mean - b.mean || budgets.indexOf(a.name) - budgets.indexOf(b.name));
  const split = lines.length ? lines[0].split : "test";
  setText(holder.querySelector("h2"), `${split === "test" ? "Test" : "Validation"} ${metricTitle() === "Score" ? "scores" : get("facts").metric} over the rounds`);
  const names = lines.map((line) => line.name).join(", ");
  chart(holder.querySelector(".chart"), lines, { height: 260, format: (value) => value.toFixed(3), named: true, bounds: [0, 1], label: `Line chart: ${get("facts").metric || "score"} over the rounds of ${names}` });
  values(holder, "scores", () => {
    const rounds = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => b - a);
    const by = lines.map((line) => new Map(line.points));
    return valuesTable(`${metricTitle()} after each round, the newest first`, ["Round", ...lines.map((line) => line.name)], rounds.map((round) => [String(round), ...by.map((known) => score(known.get(round)))]));
  });
}

function showRounds() {
  const holder = at("rounds"), charts = holder.querySelector(".charts");
  const rounds = [...parts.rounds].map(([key, value]) => [Number(key), value]).sort((a, b) => a[0] - b[0]);
  const shown = [
    ["Time of a round", "seconds", (value) => duration(value)],
    ["Bytes sent by clients", "upload_bytes", (value) => si(value, "B")],
    ["Uploads not aggregated", "rejected", (value) => String(value), true],
  ];
  if (!charts.children.length) charts.append(...shown.map(([title]) => make("figure", {}, make("figcaption", {}, title), make("div"))));
  for (const [place, [title, key, format, whole]] of shown.entries()) {
    const points = rounds.filter(([, value]) => typeof value[key] === "number").map(([round, value]) => [round, value[key]]);
    chart(charts.children[place].lastChild, [{ name: title, points }], { height: 120, format, label: `Line chart: ${title.toLowerCase()} over the rounds`, bounds: [0, Infinity], whole });
  }
  values(holder, "rounds", () => valuesTable("Rounds, the newest first", ["Round", "Time", "Clients", "Sent by them", "Sent to them", "Training", "Not aggregated", "Late", "Not needed"],
    rounds.slice().reverse().map(([round, value]) => [String(round), duration(value.seconds), count(value.asked), si(value.upload_bytes, "B"), si(value.download_bytes, "B"), si(value.training_flops, "FLOP"), String(value.rejected), String(value.late), String(value.unneeded)])));
}

// ---- the clients

const view = { page: 0, size: 25 };
const sorts = {
  number: ["number", (a, b) => a[0] - b[0]],
  state: ["state", (a, b) => order(a[1].state) - order(b[1].state) || a[0] - b[0]],
  upload: ["bytes sent", (a, b) => (b[1].upload_bytes || 0) - (a[1].upload_bytes || 0)],
  loss: ["loss, highest first", (a, b) => (b[1].loss ?? -1) - (a[1].loss ?? -1)],
  rejected: ["not aggregated", (a, b) => (b[1].rejected || 0) - (a[1].rejected || 0) || a[0] - b[0]],
};
const order = (state) => ["late", "rejected", "gone", "training", "asked", "delivered", "unneeded", "idle"].indexOf(state);

function showClients() {
  const federation = get("facts").kind === "federation";
  const everyone = [...parts.clients].map(([key, row]) => [Number(key), row]).sort((a, b) => a[0] - b[0]);
  const numbers = {};
  for (const [, row] of everyone) numbers[row.state] = (numbers[row.state] || 0) + 1;
  const named = Object.keys(stateWords).filter((state) => numbers[state]);
  at("states").replaceChildren(...named.map((state) => make("span", { class: `dot is-${state}` }, `${count(numbers[state])} ${stateWords[state]}`)));
  paintStrip(everyone, named.map((state) => `${numbers[state]} ${stateWords[state]}`).join(", "));
  const chosen = at("state").value, wanted = at("find").value.trim().toLowerCase();
  const rows = everyone.filter(([number, row]) => (!chosen || row.state === chosen) &&
    (!wanted || String(number) === wanted.replace(/^client-0*(?=\d)/, "") || (row.budget || "").toLowerCase().includes(wanted)));
  rows.sort(sorts[at("sort").value || "number"][1]);
  const last = Math.max(0, Math.ceil(rows.length / view.size) - 1);
  view.page = Math.min(view.page, last);
  const start = view.page * view.size, shown = rows.slice(start, start + view.size);
  const columns = [["Budget", (row) => row.budget || missing], ["Rounds", (row) => String(row.rounds || 0)], ["Loss", (row) => (row.loss === undefined ? missing : row.loss.toFixed(3))],
    [metricTitle(), (row) => score(row.score)], ["Sent", (row) => si(row.upload_bytes, "B")], ["Received", (row) => si(row.download_bytes, "B")],
    ["Training", (row) => si(row.training_flops, "FLOP")], ["Memory", (row) => si(row.peak_memory_bytes, "B")], ["Time", (row) => duration(row.seconds)], ["Not aggregated", (row) => String(row.rejected || 0)]];
  const used = columns.filter(([title]) => title !== metricTitle() || everyone.some(([, row]) => row.score !== undefined));
  if (everyone.some(([, row]) => row.epsilon !== undefined)) used.push(["ε", (row) => (row.epsilon === undefined ? missing : row.epsilon.toFixed(2))]);
  if (federation) used.splice(0, 0, ["Key", (row) => row.key || missing], ["Connected", (row) => (row.online === undefined ? missing : row.online ? "yes" : "no")], ["Last contact", (row) => ago(row.contact)]);
  const head = make("tr", {}, make("th", { scope: "col" }, "Client"), make("th", { scope: "col", class: "text" }, "State"), ...used.map(([title]) => make("th", { scope: "col" }, title)));
  const body = shown.map(([number, row]) => make("tr", {}, make("th", { scope: "row" }, federation ? `client-${String(number).padStart(3, "0")}` : String(number)),
    make("td", { class: row.note ? "reason" : "text" }, make("span", { class: `dot is-${row.state}` }, stateWords[row.state] || row.state), row.note ? make("small", {}, row.note) : ""),
    ...used.map(([, cell]) => make("td", {}, cell(row)))));
  const table = make("table", { class: "numbers" }, captioned("Clients: what each does now, and what it has cost so far"), make("thead", {}, head), make("tbody", {}, ...body));
  at("client-table").replaceChildren(everyone.length ? table : make("p", { class: "under" }, "No client is known yet."));
  setText(at("where"), rows.length ? `${count(start + 1)} to ${count(start + shown.length)} of ${count(rows.length)}` : "none");
  at("back").disabled = view.page === 0;
  at("next").disabled = view.page >= last;
  document.querySelector(".pager").hidden = everyone.length <= view.size && !wanted && !chosen;
}

function paintStrip(everyone, summary) {
  const canvas = at("strip"), width = canvas.clientWidth || 300, few = everyone.length <= 200;
  canvas.hidden = everyone.length < 2;
  const size = few ? 14 : 9, gap = 2, across = Math.max(1, Math.floor((width + gap) / (size + gap)));
  const height = Math.ceil(everyone.length / across) * (size + gap), scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.setAttribute("aria-label", `${countOf(everyone.length, "client")}: ${summary}`);
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), colours = {};
  const variables = { idle: "--rule", asked: "--muted", training: "--live", delivered: "--good", unneeded: "--line-5", late: "--warn", rejected: "--bad", gone: "--ink" };
  for (const [state, name] of Object.entries(variables)) colours[state] = style.getPropertyValue(name).trim();
  pen.scale(scale, scale);
  everyone.forEach(([, row], place) => {
    pen.fillStyle = colours[row.state] || colours.idle;
    pen.fillRect((place % across) * (size + gap), Math.floor(place / across) * (size + gap), size, size);
  });
  canvas.onmousemove = (event) => {
    const place = Math.floor(event.offsetY / (size + gap)) * across + Math.floor(event.offsetX / (size + gap));
    const found = everyone[place];
    canvas.title = found ? `client ${found[0]}: ${stateWords[found[1].state] || found[1].state}${found[1].note ? `, ${found[1].note}` : ""}` : "";
  };
}

function showRejections() {
  const holder = at("rejections"), rows = [...parts.rejections].map(([key, row]) => [Number(key), row]).sort((a, b) => b[0] - a[0]);
  holder.hidden = !rows.length;
  if (!rows.length) return;
  const body = rows.map(([, row]) => make("tr", {}, make("td", {}, String(row.round)), make("td", { class: "number" }, String(row.client)), make("td", {}, row.reason)));
  holder.lastElementChild.replaceChildren(make("div", { class: "scroll" }, make("table", { class: "plain" }, captioned("Uploads that came late or were not aggregated, the newest first"),
    make("thead", {}, make("tr", {}, ...["Round", "Client", "Reason"].map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, ...body))));
}

function showLog() {
  const rows = [...parts.log].map(([key, row]) => [Number(key), row]).sort((a, b) => b[1].time - a[1].time || b[0] - a[0]);
  const list = at("log"), known = new Set([...list.children].map((item) => item.dataset.key));
  const fresh = rows.filter(([key]) => !known.has(String(key)));
  const items = fresh.map(([key, row]) => make("li", { "data-key": String(key), class: row.kind }, make("time", { datetime: new Date(row.time * 1000).toISOString() }, clock(row.time)), make("span", {}, row.text)));
  list.prepend(...items);
  while (list.children.length > kept.log) list.lastChild.remove();
}

// ---- a comparison, or a folder of runs

function bar(run) {
  const line = make("div", { class: "bar" }, make("span"));
  line.firstChild.style.width = run.rounds ? `${(100 * run.round) / run.rounds}%` : "0";
  return line;
}

// The cell leads to the run's own live page; below it is a link to the report, once that is written.
function cell(number, run) {
  const live = make("a", { class: `cell word-${run.word}`, href: `${base}run/${number}/`, title: run.reason || run.place }, make("b", {}, score(run.score)), " ",
    make("span", { class: "word" }, run.word === "running" || run.word === "gone" ? `${run.round}/${run.rounds || "?"}` : words[run.word].toLowerCase()), bar(run));
  const report = run.has_report ? make("a", { class: "written", href: `${base}run/${number}/report` }, "report") : "";
  return [live, report];
}

function showGrid() {
  const facts = get("facts"), holder = at("grid");
  if (facts.kind !== "grid") return;
  const runs = [...parts.runs].map(([key, run]) => [Number(key), run]).sort((a, b) => a[0] - b[0]);
  let summary = holder.querySelector(".summary");
  if (!summary) { summary = make("p", { class: "states summary" }); holder.append(summary); }
  const numbers = {};
  for (const [, run] of runs) numbers[run.word] = (numbers[run.word] || 0) + 1;
  const written = (facts.pages || []).map((one, number) => make("a", { href: `${base}page/${number}`, title: one.place }, `Page of the ${one.kind}${facts.pages.length > 1 ? ` ${one.name}` : ""}`));
  summary.replaceChildren(...Object.keys(words).filter((word) => numbers[word]).map((word) => make("span", { class: `word-${word}` }, make("span", { class: "word" }, `${count(numbers[word])} ${words[word].toLowerCase()}`))), ...written);
  const planned = (facts.rows || []).length > 0;
  if (planned) comparison(holder, facts, runs.filter(([, run]) => run.row));
  const others = planned ? runs.filter(([, run]) => !run.row) : runs;
  if (others.length) index(holder, others);
}

function comparison(holder, facts, runs) {
  let box = holder.querySelector(".comparison");
  if (!box) { box = make("div", { class: "comparison scroll" }); holder.append(box); }
  const several = facts.columns.length > 1 || facts.columns[0];
  const head = [make("tr", {}, make("th", { scope: "col" }, "Run"), ...facts.columns.map((column) => make("th", { scope: "col" }, "Mean", make("small", {}, several ? column : "of what is there"))), ...facts.columns.flatMap((column) => facts.seeds.map((seed) => make("th", { scope: "col", class: "text" }, `seed ${seed}`, several ? make("small", {}, column) : ""))))];
  const body = facts.rows.map((row) => {
    const here = facts.columns.map((column) => runs.filter(([, run]) => run.row === row && run.column === column));
    const scores = here.map((members) => members.map(([, run]) => run.score).filter((value) => typeof value === "number"));
    return make("tr", {}, make("th", { scope: "row" }, row),
      ...scores.map((known) => make("td", { class: "strong" }, known.length ? score(known.reduce((sum, value) => sum + value, 0) / known.length) : missing)),
      ...here.flatMap((members) => facts.seeds.map((seed) => {
        const found = members.find(([, run]) => run.seed === seed);
        return make("td", { class: "cells" }, ...(found ? cell(...found) : [missing]));
      })));
  });
  box.replaceChildren(make("table", { class: "numbers" }, captioned(`Each cell: the ${metricOf(runs)} so far, and how far the run is. A cell leads to its run.`), make("thead", {}, ...head), make("tbody", {}, ...body)));
}

// What the runs' scores are: their metric, or `score` if they have several.
function metricOf(runs) {
  const known = [...new Set(runs.filter(([, run]) => run.score !== null).map(([, run]) => run.metric))];
  return known.length === 1 ? known[0] : "score";
}

function index(holder, runs) {
  let box = holder.querySelector(".index");
  if (!box) {
    box = make("section", { class: "index" }, make("h2", {}, "Runs"), make("form", { class: "filters", role: "search", "aria-label": "Runs" }), make("div", { class: "scroll" }));
    for (const key of ["method", "data", "model", "word"]) box.querySelector("form").append(make("label", {}, { method: "Method", data: "Data", model: "Model", word: "Status" }[key], " ", make("select", { "data-key": key })));
    box.querySelector("form").append(make("label", {}, "Find ", make("input", { type: "search", autocomplete: "off", placeholder: "name or folder" })));
    box.querySelector("form").addEventListener("input", () => mark("runs"));
    box.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    holder.append(box);
  }
  for (const select of box.querySelectorAll("select")) {
    const known = [...new Set(runs.map(([, run]) => run[select.dataset.key]).filter(Boolean))].sort();
    options(select, [["", "all"], ...known.map((value) => [value, select.dataset.key === "word" ? words[value].toLowerCase() : value])]);
  }
  const chosen = [...box.querySelectorAll("select")].filter((select) => select.value), wanted = box.querySelector("input").value.trim().toLowerCase();
  const shown = runs.filter(([, run]) => chosen.every((select) => run[select.dataset.key] === select.value) && (!wanted || `${run.name} ${run.place}`.toLowerCase().includes(wanted)));
  const heads = ["Run", "Status", "Score", "Metric", "Before", "Rounds", "Method", "Data", "Model", "Clients", "Seed", "Time"];
  const body = shown.map(([number, run]) => make("tr", { class: `word-${run.word}` }, make("th", { scope: "row" }, make("a", { href: `${base}run/${number}/` }, run.name), make("small", {}, run.place, ...(run.has_report ? [" · ", make("a", { href: `${base}run/${number}/report` }, "report")] : []))),
    make("td", { class: "word", title: run.reason }, words[run.word].toLowerCase()), make("td", { class: "strong" }, score(run.score)), make("td", {}, run.score === null ? missing : run.metric), make("td", {}, score(run.before)), make("td", {}, `${run.round}/${run.rounds || "?"}`),
    ...[run.method, run.data, run.model].map((value) => make("td", {}, value || missing)), make("td", {}, run.clients ? count(run.clients) : missing), make("td", {}, run.seed === null ? missing : String(run.seed)), make("td", {}, duration(run.seconds))));
  box.lastElementChild.replaceChildren(make("table", { class: "numbers wide runs" }, captioned(`${count(shown.length)} of ${countOf(runs.length, "run")}`), make("thead", {}, make("tr", {}, ...heads.map((title) => make("th", { scope: "col" }, title)))), make("tbody", {}, ...body)));
}

function options(select, wanted) {
  const known = [...select.options].map((option) => option.value).join("\n");
  if (known === wanted.map(([value]) => value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(([value, text]) => make("option", { value }, text)));
  if (wanted.some(([value]) => value === chosen)) select.value = chosen;
}

// ---- changes, and when they are shown

const shows = { page: [showHead, showProgress, showTiles], scores: [showScores, showTiles], rounds: [showRounds], clients: [showClients], rejections: [showRejections], log: [showLog], runs: [showGrid, showHead] };
const pauseMilliseconds = 150;
let waiting = false, shownAt = 0;

function mark(...names) {
  names.forEach((name) => dirty.add(name));
  if (waiting) return;
  waiting = true;
  setTimeout(() => requestAnimationFrame(show), Math.max(0, pauseMilliseconds - (performance.now() - shownAt)));
}

function show() {
  waiting = false;
  const functions = new Set([...dirty].flatMap((name) => shows[name]));
  if (dirty.has("page")) { functions.add(showGrid); }
  dirty.clear();
  const kind = get("facts").kind;
  showHead();
  for (const one of functions) {
    if (one === showHead || (kind === "grid") !== (one === showGrid)) continue;
    if (kind === "run" || kind === "federation" || kind === "grid") one();
  }
  shownAt = performance.now();
  document.documentElement.dataset.version = String(known.version);
}

const known = { epoch: -1, version: 0, kind: "" };

function take(change) {
  if (change.reset) {
    for (const part of Object.values(parts)) part.clear();
    at("log").replaceChildren();
    mark(...Object.keys(parts));
  }
  Object.assign(known, { epoch: change.epoch, version: change.version });
  for (const [name, entries] of Object.entries(change.parts)) {
    const part = parts[name];
    if (!part) continue;
    for (const [key, value] of Object.entries(entries)) part.set(key, value);
    if (kept[name] && part.size > kept[name]) {
      const keys = [...part.keys()].sort((a, b) => a - b);
      for (const key of keys.slice(0, part.size - kept[name])) part.delete(key);
    }
    mark(name);
  }
  const kind = get("facts").kind;
  if (kind !== known.kind) { known.kind = kind; mark(...Object.keys(parts)); }
}

function connect() {
  const link = at("link"), source = new EventSource(`${here}events`);
  source.onopen = () => { link.className = "link live"; setText(link, "live"); };
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => { link.className = "link lost"; setText(link, "connection lost; what is shown is as of then"); };
}

options(at("state"), [["", "all"], ...Object.entries(stateWords)]);
options(at("sort"), Object.entries(sorts).map(([key, [title]]) => [key, title]));
for (const id of ["state", "sort", "find"]) at(id).addEventListener("input", () => { view.page = 0; mark("clients"); });
document.querySelector("#clients form").addEventListener("submit", (event) => event.preventDefault());
at("back").addEventListener("click", () => { view.page -= 1; mark("clients"); });
at("next").addEventListener("click", () => { view.page += 1; mark("clients"); });
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; mark("clients"); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => mark("clients"));
setInterval(() => { if (get("standing").word === "running") { showProgress(); if (get("facts").kind === "federation") mark("clients"); } }, 1000);
connect();
