"use strict";
/* A fleet: its instances over time, what the router chose, what moved between them. */
const TICKS = {join: "▸", left: "◂", died: "✕"};
function strips(root, names, count, row, left, top) {
  const canvas = make("canvas", undefined, root); canvas.tabIndex = 0; canvas.setAttribute("role", "img");
  const state = {canvas, width: 0, at: 0, line: 0};
  state.begin = () => {
    state.width = Math.max(260, root.clientWidth - 4);
    const height = top + row * names.length, scale = window.devicePixelRatio || 1;
    canvas.width = state.width * scale; canvas.height = height * scale;
    canvas.style.width = state.width + "px"; canvas.style.height = height + "px";
    const g = canvas.getContext("2d"); g.scale(scale, scale);
    g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle"; g.fillStyle = css("--fg");
    names.forEach((name, i) => {
      let text = name;
      while (text.length > 2 && g.measureText(text).width > left - 8) text = text.slice(0, -2) + "…";
      g.fillText(text, 2, top + i * row + row / 2);
    });
    return g;
  };
  state.move = (draw) => {
    canvas.addEventListener("mousemove", (e) => {
      state.line = clip(Math.floor((e.offsetY - top) / row), 0, names.length - 1);
      state.at = clip(Math.floor((e.offsetX - left) * count / (state.width - left)), 0, count - 1);
      draw();
    });
    canvas.addEventListener("keydown", (e) => {
      const by = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1], Home: [-1e9, 0], End: [1e9, 0]}[e.key];
      if (!by) return;
      e.preventDefault();
      state.at = clip(state.at + by[0], 0, count - 1); state.line = clip(state.line + by[1], 0, names.length - 1);
      draw();
    });
    addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  };
  return state;
}

function fleetPanel(fleet, root) {
  const columns = {"busy share": "busy", "requests under way": "under_way", "share of the pool held": "held"};
  const bar = make("div", undefined, root); bar.className = "bar";
  const pick = make("select", undefined, make("label", "show ", bar)); pick.className = "column";
  for (const name of Object.keys(columns)) make("option", name, pick).value = name;
  const legend = make("span", "", bar);
  const row = fleet.instances.length > 24 ? 12 : 20, left = 84, names = fleet.instances.map((i) => i.name);
  const view = strips(root, names, fleet.bins, row, left, 0);
  const readout = make("div", undefined, root); readout.className = "readout"; readout.setAttribute("aria-live", "polite");
  function draw() {
    const key = columns[pick.value], g = view.begin(), wide = (view.width - left) / fleet.bins;
    const most = key === "under_way" ? Math.max(1, ...fleet.instances.flatMap((i) => i[key].map((v) => v ?? 0))) : 1;
    fleet.instances.forEach((line, i) => {
      const y = i * row + 1, h = row - 2;
      line[key].forEach((v, b) => {
        if (v === null) return;
        const x = left + b * wide, filled = h * Math.min(v / most, 1);
        g.globalAlpha = 1; g.fillStyle = css("--blank"); g.fillRect(x, y, wide + 0.5, h);
        g.fillStyle = css("--one"); g.fillRect(x, y + h - filled, wide + 0.5, filled); /* height as well as colour */
      });
      g.fillStyle = css("--fg");
      const mark = (t, what) => g.fillText(TICKS[what], clip(left + (view.width - left) * t / (fleet.span || 1) - 4, left, view.width - 10), y + h / 2);
      if (line.joined > 0) mark(line.joined, "join");
      if (line.why === "left" || line.why === "died") mark(line.gone, line.why);
    });
    g.strokeStyle = css("--lit"); g.lineWidth = 2;
    g.strokeRect(left + view.at * wide, view.line * row + 1, Math.max(wide, 2), row - 2);
    const line = fleet.instances[view.line], bin = fleet.span / fleet.bins, part = (v, text) => (v === null ? "" : `, ${text(v)}`);
    readout.textContent = `${line.name} (${line.role}) from ${seconds(view.at * bin)} to ${seconds((view.at + 1) * bin)}` +
      (line.busy[view.at] === null ? ": not there" : part(line.busy[view.at], (v) => `busy ${(100 * v).toFixed(1)} %`) +
      part(line.under_way[view.at], (v) => `${v.toFixed(2)} requests under way`) + part(line.held[view.at], (v) => `${(100 * v).toFixed(1)} % of ${line.usable} blocks held`)) +
      `\n${line.steps} steps in all; joined at ${seconds(line.joined)}` + (line.why === "left" || line.why === "died" ? `, ${line.why} at ${seconds(line.gone)}` : "");
    legend.textContent = `bars from 0 to ${key === "under_way" ? most.toFixed(1) : "100 %"}; ▸ joined ◂ left ✕ died`;
    view.canvas.setAttribute("aria-label", readout.textContent);
    root.dataset.shown = [line.name, view.at, line[key][view.at]].join(" ");
  }
  pick.addEventListener("change", draw);
  view.move(draw);
  draw();
}

/* ------------------------------------------------------------------ routing */
function routingPanel(fleet, root) {
  const bar = make("div", undefined, root); bar.className = "bar";
  const sort = make("select", undefined, make("label", "sort by ", bar)); sort.className = "sort";
  const took = (r) => (r.end === null ? null : r.end - r.t);
  const orders = {"time": (r) => r.t, "latency": (r) => -(took(r) ?? 1e18), "lives": (r) => -r.to.length,
    "expected less found": (r) => -((r.expected ?? 0) - (r.cached ?? 0)), "tokens from the cache": (r) => -(r.cached ?? 0)};
  for (const name of Object.keys(orders)) make("option", name, sort).value = name;
  const filter = make("input", undefined, make("label", "instance or reason contains ", bar)); filter.className = "filter"; filter.size = 10;
  const count = make("span", "", bar);
  const scroll = make("div", undefined, root); scroll.className = "scroll"; scroll.tabIndex = 0;
  scroll.setAttribute("role", "region"); scroll.setAttribute("aria-label", "routed requests");
  const table = make("table", undefined, scroll), head = make("tr", undefined, make("thead", undefined, table));
  for (const name of ["request", "came", "prompt", "sent to", "decoded by", "expected cached", "found cached", "latency", "why there"]) make("th", name, head).scope = "col";
  const body = make("tbody", undefined, table);
  function fill() {
    body.replaceChildren();
    const has = (r) => (r.to.join(" ") + " " + r.decoders.join(" ") + " " + r.reason + " " + (r.refused || "")).includes(filter.value);
    const wanted = fleet.requests.filter(has).sort((a, b) => orders[sort.value](a) - orders[sort.value](b));
    count.textContent = `${wanted.length} of ${fleet.num_requests} requests` + (wanted.length > 500 ? ", the first 500 shown" : "");
    for (const r of wanted.slice(0, 500)) {
      const line = make("tr", undefined, body); line.dataset.id = r.id;
      for (const text of [r.id, seconds(r.t), r.prompt ?? "–", r.refused ? `refused: ${r.refused}` : r.to.join(", then "), r.decoders.join(", then ") || "the same",
        r.expected ?? "not asked", r.cached ?? "–", took(r) === null ? "–" : seconds(took(r)), r.reason || "–"]) make("td", text, line);
    }
  }
  sort.addEventListener("change", fill); filter.addEventListener("input", fill);
  fill();
}

/* ------------------------------------------------------------------ transfers */
function movesPanel(fleet, root) {
  if (!fleet.totals.length) { make("p", "No KV moved between instances.", root); return; }
  const lane = (m) => `${m[0]}: ${m[1]} → ${m[2]}`;
  const lanes = fleet.totals.slice().sort((a, b) => b[4] - a[4]).slice(0, 24).map(lane), count = 400, row = 16, left = 190;
  if (fleet.totals.length > lanes.length) make("p", `${lanes.length} of ${fleet.totals.length} ways are drawn, those with the most bytes`, root).className = "source";
  if (fleet.num_moves > fleet.moves.length) make("p", `the first ${fleet.moves.length} of ${fleet.num_moves} transfers are drawn; the table has all`, root).className = "source";
  const view = strips(root, lanes, count, row, left, 0);
  const readout = make("div", undefined, root); readout.className = "readout"; readout.setAttribute("aria-live", "polite");
  const at = new Map(lanes.map((name, i) => [name, i])), drawn = fleet.moves.filter((m) => at.has(lane(m)));
  function draw() {
    const g = view.begin(), wide = view.width - left, x = (t) => left + wide * t / (fleet.span || 1);
    for (const m of drawn) {
      const y = at.get(lane(m)) * row + 2;
      g.fillStyle = css(m[7] ? "--out" : "--one"); g.fillRect(x(m[4]), y, Math.max(1, wide * m[5] / (fleet.span || 1)), row - 4);
      if (m[7]) { g.fillStyle = css("--bg"); g.fillRect(x(m[4]), y + row / 2 - 3, Math.max(1, wide * m[5] / (fleet.span || 1)), 2); }
    }
    g.strokeStyle = css("--lit"); g.lineWidth = 2; g.strokeRect(left + view.at * wide / count, view.line * row + 1, Math.max(2, wide / count), row - 2);
    const from = view.at * fleet.span / count, to = (view.at + 1) * fleet.span / count;
    const here = drawn.filter((m) => at.get(lane(m)) === view.line && m[4] < to && m[4] + m[5] >= from);
    readout.textContent = `${lanes[view.line]}, ${seconds(from)} to ${seconds(to)}: ` +
      (here.length ? here.slice(0, 4).map((m) => `${m[3]} bytes in ${seconds(m[5])}${m[6] === null ? "" : " for request " + m[6]}${m[7] ? ", lost" : ""}`).join("; ") + (here.length > 4 ? `; and ${here.length - 4} more` : "") : "nothing");
    view.canvas.setAttribute("aria-label", readout.textContent);
    root.dataset.shown = [view.line, view.at, here.length].join(" ");
  }
  view.move(draw);
  draw();
}
