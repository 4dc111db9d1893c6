"use strict";
/* The page of `pagedjax report`: draws what the data block says; every number in it was counted in Python. */
const DATA = JSON.parse(document.getElementById("data").textContent);
const seconds = (s) => (s === null || s === undefined ? "never" : s < 1 ? (1000 * s).toFixed(1) + " ms" : s.toFixed(3) + " s");

/* ------------------------------------------------------------------ the pool at any step */
class Pool {
  /* Blocks of the first KV group. State after entry i = nearest key state before it + the changes since. */
  constructor(run) {
    this.run = run;
    this.size = run.pool_blocks[0] || 0;
    this.every = Math.max(1, Math.ceil(run.steps.length * this.size / 4e6), 64);
    this.keys = [];
    this.at = -1;
    this.owners = new Uint16Array(this.size);
    this.held = new Uint8Array(this.size); // 1: indexed
    this.digest = new Array(this.size).fill("");
    this.since = new Int32Array(this.size).fill(-1);
    this.tables = new Map();
    for (let i = 0; i < run.steps.length; i++) {
      this.apply(i);
      if (i % this.every === 0) this.keys.push(this.copy());
    }
    if (run.steps.length) this.go(0);
  }
  copy() {
    return {at: this.at, owners: this.owners.slice(), held: this.held.slice(), digest: this.digest.slice(),
      since: this.since.slice(), tables: new Map([...this.tables].map(([s, t]) => [s, t.slice()]))};
  }
  apply(i) {
    for (const [group, block, owners, ...content] of this.run.blocks[i]) {
      if (group) continue;
      this.owners[block] = owners;
      this.since[block] = i;
      if (content.length) { this.held[block] = content[0] === null ? 0 : 1; this.digest[block] = content[0] || ""; }
    }
    for (const [seq, group, position, blocks] of this.run.tables[i]) {
      if (group) continue;
      const table = this.tables.get(seq) || [];
      blocks.forEach((b, k) => { table[position + k] = b; });
      this.tables.set(seq, table);
    }
    for (const seq of this.run.gone[i]) this.tables.delete(seq);
    this.at = i;
  }
  go(i) {
    i = clip(i, 0, this.run.steps.length - 1);
    if (i < this.at || i - this.at > this.every) {
      const key = this.keys[Math.floor(i / this.every)];
      this.owners.set(key.owners); this.held.set(key.held); this.since.set(key.since);
      this.digest = key.digest.slice();
      this.tables = new Map([...key.tables].map(([s, t]) => [s, t.slice()]));
      this.at = key.at;
    }
    while (this.at < i) this.apply(this.at + 1);
    return this;
  }
  state(block) { return stateOf(this.owners[block], this.held[block]); }
  holders(block) {
    const out = [];
    for (const [seq, table] of this.tables) if (table.includes(block)) out.push(this.run.owner[seq] ?? String(seq));
    return out;
  }
}
function poolPanel(run, root) {
  if (!run.steps.length || !run.pool_blocks.length) { make("p", "This record holds no step.", root); return null; }
  const pool = new Pool(run);
  const bar = make("div", undefined, root); bar.className = "bar";
  const play = make("button", "Play", bar);
  const label = make("label", "step ", bar);
  const slider = make("input", undefined, label);
  slider.type = "range"; slider.min = 0; slider.max = run.steps.length - 1; slider.value = 0;
  slider.className = "step";
  const pickLabel = make("label", "table of request ", bar);
  const pick = make("select", undefined, pickLabel); pick.className = "pick";
  make("option", "none", pick).value = "";
  for (const r of run.requests.slice(0, 2000)) make("option", r.id, pick).value = r.id;
  const grid = new BlockGrid(root, pool.size, "in the chosen request's table"), {canvas, readout} = grid;
  function draw() {
    const chosen = new Set();
    if (pick.value !== "") for (const [seq, table] of pool.tables) if (run.owner[seq] === pick.value) table.forEach((b) => chosen.add(b));
    grid.draw((b) => pool.state(b), chosen);
    const [first, many, start, took, rowsNow, tokens] = run.steps[pool.at], n = run.counts[pool.at];
    canvas.setAttribute("aria-label", `pool at step ${first}: ` + STATES.map((s, i) => `${n[i]} ${s}`).join(", "));
    root.dataset.step = pool.at; root.dataset.counts = n.join(" ");
    readout.textContent = `step ${first}${many > 1 ? " to " + (first + many - 1) : ""} at ${seconds(start)}, took ${seconds(took)}: ${rowsNow} rows, ${tokens} tokens a step\n` +
      STATES.map((s, i) => `${s} ${n[i]}`).join("   ");
  }
  function go(i) { pool.go(i); slider.value = pool.at; draw(); }
  slider.addEventListener("input", () => go(+slider.value));
  pick.addEventListener("change", draw);
  let timer = 0;
  play.addEventListener("click", () => {
    if (timer) { clearInterval(timer); timer = 0; play.textContent = "Play"; return; }
    play.textContent = "Stop";
    if (pool.at >= run.steps.length - 1) go(0);
    const stride = Math.max(1, Math.round(run.steps.length / 400));
    timer = setInterval(() => { if (pool.at >= run.steps.length - 1) play.click(); else go(pool.at + stride); }, 50);
  });
  canvas.addEventListener("keydown", (e) => {
    const by = {ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -1e9, End: 1e9}[e.key];
    if (by === undefined) return;
    e.preventDefault(); go(pool.at + by);
  });
  canvas.addEventListener("mousemove", (e) => {
    const b = grid.at(e);
    if (!b) return;
    if (grid.perCell > 1) { readout.textContent = `blocks ${b} to ${Math.min(b + grid.perCell, pool.size) - 1}`; return; }
    const who = pool.holders(b), age = pool.since[b] < 0 ? null : run.steps[pool.at][2] - run.steps[pool.since[b]][2];
    readout.textContent = `block ${b}: ${STATES[pool.state(b)]}, ${pool.owners[b]} owners${who.length ? " (" + who.slice(0, 12).join(", ") + (who.length > 12 ? ", …" : "") + ")" : ""}\n` +
      `content ${pool.digest[b] || "not indexed"}, ` + (age === null ? "never changed" : `last change ${seconds(age)} ago`);
  });
  canvas.addEventListener("mouseleave", draw);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  return {go, pool, choose(id, step) { pick.value = id; go(step ?? pool.at); }};
}

/* ------------------------------------------------------------------ series */
function seriesPanel(run, root, panel) {
  if (!run.steps.length) return;
  const place = make("div", undefined, root); place.className = "chart";
  const x = run.steps.map((s) => s[2] + s[3]);
  const sums = [run.counts.map((c) => c[2]), run.counts.map((c) => c[2] + c[1]), run.counts.map((c) => c[2] + c[1] + c[3])];
  const ink = css("--fg"), axis = {stroke: ink, grid: {stroke: css("--line"), width: 1}};
  const chart = new uPlot({
    width: Math.max(280, root.clientWidth - 30), height: 240, scales: {x: {time: false}},
    series: [{label: "seconds"}, {label: "shared", stroke: css("--shared"), width: 2}, {label: "+ one owner", stroke: css("--one"), width: 2, dash: [6, 3]},
      {label: "+ cached", stroke: css("--cached"), width: 2, dash: [2, 3]}, {label: "rows", scale: "rows", stroke: ink, width: 1}],
    axes: [{...axis, label: "seconds on the run's clock"}, {...axis, label: "blocks"}, {...axis, scale: "rows", side: 1, label: "rows", grid: {show: false}}],
  }, [x, ...sums, run.steps.map((s) => s[4])], place);
  addEventListener("resize", () => chart.setSize({width: Math.max(280, root.clientWidth - 30), height: 240}));
  chart.over.addEventListener("click", () => { if (panel && chart.cursor.idx !== null) panel.go(chart.cursor.idx); });
}

/* ------------------------------------------------------------------ requests */
const SPANS = {wait: "--wait", prefill: "--prefill", decode: "--decode", preempted: "--out", swapped: "--shared"};
function why(run, r) {
  const out = [], first = r.first === null ? null : r.first - r.arrival;
  const time = {};
  for (const [a, b, what] of r.spans) time[what] = (time[what] || 0) + b - a;
  out.push(`arrived ${seconds(r.arrival)}, ${r.prompt} prompt tokens, ${r.max_new === null ? "" : `at most ${r.max_new} new, `}${r.samples} sample${r.samples > 1 ? "s" : ""}`);
  out.push(r.hit === null ? "was never admitted" : `admitted with ${r.hit} tokens from the cache (${r.matched} known); the match stopped: ${r.reason}`);
  out.push(`first token after ${seconds(first)}; ended: ${r.why || "not within this record"}${r.end === null ? "" : " at " + seconds(r.end)}; output tokens ${r.tokens.join(", ") || "unknown"}; ${r.copies} blocks copied on write`);
  out.push("seconds: " + Object.entries(time).map(([k, v]) => `${k} ${v.toFixed(3)}`).join(", "));
  if (r.compile_s || r.copy_s) out.push(`of its steps, ${seconds(r.compile_s)} went to compiling programs and ${seconds(r.copy_s)} to copying blocks`);
  const total = Object.values(time).reduce((a, b) => a + b, 0), most = Object.entries(time).sort((a, b) => b[1] - a[1])[0];
  if (most && total > 0) out.push(`most of its time (${Math.round(100 * most[1] / total)} %) went to: ${most[0]}`);
  for (const [step, how] of r.preemptions) out.push(`preempted in step ${step} (${how})`);
  if (r.chunks.length) out.push("prefill chunks (step: tokens from position): " + r.chunks.slice(0, 20).map(([s, a, n]) => `${s}: ${n} from ${a}`).join("; ") + (r.chunks.length > 20 ? "; …" : ""));
  const took = run.left.filter((e) => e[3] === r.id).length;
  if (took) out.push(`its blocks pushed out ${took} cached blocks`);
  if (r.text !== null && r.text !== undefined) out.push("prompt: " + r.text.slice(0, 2000));
  return out.join("\n");
}
function requestsPanel(run, root, panel) {
  const bar = make("div", undefined, root); bar.className = "bar";
  const sort = make("select", undefined, make("label", "sort by ", bar)); sort.className = "sort";
  const orders = {arrival: (r) => r.arrival, "time to first token": (r) => -(r.first === null ? 1e18 : r.first - r.arrival),
    latency: (r) => -(r.end === null ? 1e18 : r.end - r.arrival), "waiting": (r) => -r.spans.filter((s) => s[2] === "wait").reduce((a, s) => a + s[1] - s[0], 0),
    preemptions: (r) => -r.preemptions.length, "tokens from the cache": (r) => -(r.hit || 0)};
  for (const name of Object.keys(orders)) make("option", name, sort).value = name;
  const filter = make("input", undefined, make("label", "id contains ", bar)); filter.className = "filter"; filter.size = 8;
  const count = make("span", "", bar);
  const scroll = make("div", undefined, root); scroll.className = "scroll"; scroll.tabIndex = 0;
  scroll.setAttribute("role", "region"); scroll.setAttribute("aria-label", "requests");
  const table = make("table", undefined, scroll), head = make("tr", undefined, make("thead", undefined, table));
  for (const name of ["request", "prompt", "hit", "first token", "latency", "preempted", "ended", "from arrival to end"]) make("th", name, head).scope = "col";
  const body = make("tbody", undefined, table);
  const legend = make("ul", undefined, root); legend.className = "legend";
  for (const name of Object.keys(SPANS)) { const li = make("li", undefined, legend); const c = make("canvas", undefined, li); c.width = c.height = 12; c.style.display = "inline-block"; paint(c, name); li.append(" " + name); }
  const detail = make("div", "Choose a request to see why it took what it took.", root); detail.className = "readout detail"; detail.setAttribute("aria-live", "polite");
  const end = Math.max(1e-9, ...run.requests.map((r) => r.end ?? (r.spans.length ? r.spans[r.spans.length - 1][1] : r.arrival)));
  function paint(c, name) { const g = c.getContext("2d"); g.fillStyle = css(SPANS[name]); g.fillRect(0, 0, c.width, c.height); hatch(g, 0, c.width, c.height, name); }
  function hatch(g, x, w, h, name) { /* shape as well as colour */
    g.fillStyle = css("--bg");
    if (name === "decode") g.fillRect(x, h / 2 - 1, w, 1);
    if (name === "preempted" || name === "swapped") for (let i = x; i < x + w; i += name === "swapped" ? 6 : 3) g.fillRect(i, 0, 1, h);
  }
  function choose(r, row) {
    for (const other of body.querySelectorAll("[aria-selected=true]")) other.setAttribute("aria-selected", "false");
    row.setAttribute("aria-selected", "true");
    detail.textContent = `request ${r.id}\n` + why(run, r);
    if (panel) { let i = run.steps.findIndex((s) => s[2] + s[3] >= (r.first ?? r.arrival)); panel.choose(r.id, i < 0 ? undefined : i); }
  }
  function fill() {
    body.replaceChildren();
    const wanted = run.requests.filter((r) => r.id.includes(filter.value)).sort((a, b) => orders[sort.value](a) - orders[sort.value](b));
    count.textContent = `${wanted.length} requests` + (wanted.length > 500 ? ", the first 500 drawn" : "");
    for (const r of wanted.slice(0, 500)) {
      const row = make("tr", undefined, body); row.className = "pick"; row.tabIndex = 0; row.dataset.id = r.id; row.setAttribute("aria-selected", "false");
      for (const text of [r.id, r.prompt, r.hit ?? "–", r.first === null ? "–" : seconds(r.first - r.arrival), r.end === null ? "–" : seconds(r.end - r.arrival), r.preemptions.length, r.why || "–"]) make("td", text, row);
      const c = make("canvas", undefined, make("td", undefined, row)); c.width = 220; c.height = 12; c.setAttribute("role", "img"); c.setAttribute("aria-label", "time line");
      const g = c.getContext("2d");
      for (const [a, b, what] of r.spans) { const x = 220 * a / end, w = Math.max(1, 220 * (b - a) / end); g.fillStyle = css(SPANS[what]); g.fillRect(x, 0, w, 12); hatch(g, x, w, 12, what); }
      row.addEventListener("click", () => choose(r, row));
      row.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(r, row); } });
    }
  }
  sort.addEventListener("change", fill); filter.addEventListener("input", fill);
  fill();
}

/* ------------------------------------------------------------------ prefix explorer */
function prefixPanel(data, root) {
  const bar = make("div", undefined, root); bar.className = "bar";
  const range = (text, low, high, value, name) => { const l = make("label", text + " ", bar), i = make("input", undefined, l), o = make("output", "", l); i.type = "range"; i.min = low; i.max = high; i.value = value; i.className = name; i.addEventListener("input", draw); return [i, o]; };
  const [prompt, promptOut] = range("prompt", 1, data.most, 14, "prompt"), [prefix, prefixOut] = range("known prefix", 0, data.most, 10, "prefix"), [size, sizeOut] = range("block size", 0, data.sizes.length - 1, 2, "size");
  const mode = make("select", undefined, make("label", "index ", bar)); mode.className = "mode";
  for (const name of Object.keys(data.tables)) make("option", name, mode).value = name;
  mode.addEventListener("change", draw);
  const tokens = make("p", undefined, root); tokens.className = "tokens";
  const readout = make("div", undefined, root); readout.className = "readout";
  function draw() {
    const n = +prompt.value, p = Math.min(+prefix.value, n), s = data.sizes[+size.value];
    promptOut.textContent = n; prefixOut.textContent = p; sizeOut.textContent = s;
    const hit = data.tables[mode.value][s][n * (n + 1) / 2 - 1 + p];
    tokens.replaceChildren();
    for (let i = 0; i < n; i++) { if (i && i % s === 0) tokens.append("|"); make(i < hit ? "b" : i < p ? "i" : "u", i < hit ? "#" : i < p ? "o" : ".", tokens); }
    root.dataset.hit = hit;
    readout.textContent = `${hit} tokens from the cache (#), ${p - hit > 0 ? p - hit : 0} known but computed (o), ${n - Math.max(hit, p)} new (.)`;
  }
  draw();
}

for (const [i, run] of DATA.runs.entries()) {
  const panel = poolPanel(run, $(`pool-${i}`));
  seriesPanel(run, $(`series-${i}`), panel);
  requestsPanel(run, $(`requests-${i}`), panel);
}
for (const [i, fleet] of DATA.fleets.entries()) {
  fleetPanel(fleet, $(`fleet-${i}`));
  routingPanel(fleet, $(`routing-${i}`));
  movesPanel(fleet, $(`moves-${i}`));
}
for (const [i, curve] of DATA.curves.entries()) curvePanel(curve, $(`curve-${i}`));
for (const [i, facts] of DATA.checkups.entries()) checkupPanel(facts, $(`checkup-${i}`));
prefixPanel(DATA.prefix, $("prefix"));
document.body.dataset.ready = "yes";
