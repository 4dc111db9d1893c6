"use strict";
/* Of traces: hit ratio against capacity, and the check-up of their prompts. Every number was counted in Python. */
const LINES = ["--one", "--shared", "--accent", "--lit", "--out", "--cached", "--dim"];
const DASHES = [[], [6, 3], [2, 3], [8, 2, 2, 2], [1, 2], [10, 4]];

function curvePanel(curve, root) {
  const bar = make("div", undefined, root); bar.className = "bar";
  const choice = (text, names, name) => {
    const pick = make("select", undefined, make("label", text + " ", bar)); pick.className = name;
    for (const each of names) make("option", each, pick).value = each;
    pick.addEventListener("change", draw);
    return pick;
  };
  const unit = choice("capacity in", ["blocks", "tokens", "MiB"], "unit"), by = choice("hits by", ["block", "token"], "by");
  const bytes = make("input", undefined, make("label", "KV bytes per token ", bar));
  bytes.type = "number"; bytes.min = 1; bytes.value = 131072; bytes.className = "bytes";
  const place = make("div", undefined, root); place.className = "chart";
  const readout = make("div", "Point at the chart for exact values.", root); readout.className = "readout";
  let chart = null;
  function draw() {
    place.replaceChildren();
    bytes.disabled = unit.value !== "MiB";
    const values = by.value === "block" ? curve.policies : curve.by_token, names = Object.keys(values);
    const scale = {blocks: 1, tokens: curve.block_size, MiB: curve.block_size * (+bytes.value || 1) / 1048576}[unit.value];
    const ink = css("--fg"), axis = {stroke: ink, grid: {stroke: css("--line"), width: 1}};
    const say = (i) => {
      const at = curve.capacities[i] * scale;
      readout.textContent = `${+at.toPrecision(6)} ${unit.value}: ` + names.map((n) => `${n} ${values[n][i] === null ? "unknown" : values[n][i].toFixed(4)}`).join(", ");
      root.dataset.shown = [at, ...names.map((n) => values[n][i])].join(" ");
    };
    chart = new uPlot({
      width: Math.max(280, root.clientWidth - 30), height: 300, scales: {x: {time: false, distr: 3}, y: {range: [0, 1]}},
      series: [{label: unit.value}, ...names.map((name, i) => ({label: name, stroke: css(LINES[i % LINES.length]), width: 2, dash: DASHES[i % DASHES.length]}))],
      axes: [{...axis, label: unit.value === "MiB" ? "MiB of KV" : unit.value}, {...axis, label: `hit ratio by ${by.value}`}],
      hooks: {setCursor: [(u) => { const i = u.cursor.idx; if (i !== null && i !== undefined) say(i); }]},
    }, [curve.capacities.map((c) => c * scale), ...names.map((n) => values[n])], place);
  }
  bytes.addEventListener("input", draw);
  addEventListener("resize", draw);
  draw();
}

/* ------------------------------------------------------------------ check-up */
const PARTS = [["found", "taken from the cache", "--one"], ["below_block", "lost below a block", "--shared"],
  ["last_token", "lost to the last token", "--out"], ["new", "new", "--blank"]];
function hatchPart(g, x, y, w, h, part) { /* shape as well as colour */
  g.fillStyle = css("--bg");
  if (part === "below_block") for (let i = x; i < x + w; i += 5) g.fillRect(i, y, Math.min(1.5, x + w - i), h);
  if (part === "last_token") g.fillRect(x, y + h / 2 - 1, w, 2);
}
function checkupPanel(facts, root) {
  const canvas = make("canvas", undefined, root); canvas.tabIndex = 0; canvas.setAttribute("role", "img");
  const readout = make("div", undefined, root); readout.className = "readout"; readout.setAttribute("aria-live", "polite");
  const legend = make("ul", undefined, root); legend.className = "legend";
  for (const [part, text, colour] of PARTS) {
    const li = make("li", undefined, legend), c = make("canvas", undefined, li), g = c.getContext("2d");
    c.width = 18; c.height = 12; c.style.display = "inline-block"; c.setAttribute("aria-hidden", "true");
    g.fillStyle = css(colour); g.fillRect(0, 0, 18, 12); hatchPart(g, 0, 0, 18, 12, part); li.append(" " + text);
  }
  const row = 26, left = 78;
  let chosen = Math.max(0, facts.sizes.findIndex((s) => s.block_size === facts.best));
  function draw() {
    const width = Math.max(240, root.clientWidth - 8), height = row * facts.sizes.length, scale = window.devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.width = width + "px"; canvas.style.height = height + "px";
    const g = canvas.getContext("2d"), whole = width - left - 4; g.scale(scale, scale);
    g.font = "13px system-ui, sans-serif"; g.textBaseline = "middle";
    facts.sizes.forEach((size, i) => {
      const y = i * row + 3, h = row - 6;
      g.fillStyle = css("--fg"); g.fillText(`${size.block_size}${size.block_size === facts.best ? " ✓" : ""}`, 4, y + h / 2);
      let x = left;
      for (const [part, , colour] of PARTS) {
        const w = size.looked_up ? whole * size[part] / size.looked_up : 0;
        g.fillStyle = css(colour); g.fillRect(x, y, w, h); hatchPart(g, x, y, w, h, part); x += w;
      }
      if (i === chosen) { g.strokeStyle = css("--lit"); g.lineWidth = 2; g.strokeRect(left, y, whole, h); }
    });
    const size = facts.sizes[chosen];
    if (!size) return;
    const share = (n) => `${n} (${size.looked_up ? (100 * n / size.looked_up).toFixed(1) : "0.0"} %)`;
    readout.textContent = `blocks of ${size.block_size}: ` + PARTS.map(([part, text]) => `${text} ${share(size[part])}`).join(", ") + `; of ${size.looked_up} ${facts.unit}`;
    canvas.setAttribute("aria-label", readout.textContent);
    root.dataset.costs = [size.block_size, ...PARTS.map(([part]) => size[part])].join(" ");
  }
  canvas.addEventListener("mousemove", (e) => { const i = Math.floor(e.offsetY / row); if (i !== chosen && i >= 0 && i < facts.sizes.length) { chosen = i; draw(); } });
  canvas.addEventListener("keydown", (e) => {
    const by = {ArrowDown: 1, ArrowUp: -1, Home: -1e9, End: 1e9}[e.key];
    if (by === undefined) return;
    e.preventDefault(); chosen = clip(chosen + by, 0, facts.sizes.length - 1); draw();
  });
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
