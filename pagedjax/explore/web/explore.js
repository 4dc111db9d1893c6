"use strict";
/* The page of `pagedjax explore`: sends commands, draws the state that comes back; decides nothing itself. */
let state = null, grid = null, pointed = 0, stream = null;
const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
const box = $("pool");

/* ------------------------------------------------------------------ to the manager and back */
async function ask(path, body) {
  let told;
  try {
    const reply = await fetch(path, {method: "POST", body, headers: {"Content-Type": "application/json"}});
    told = reply.headers.get("content-type").startsWith("application/json") ? await reply.json() : {error: await reply.text()};
  } catch { told = {error: "pagedjax explore does not answer: it has ended; what is shown was its last state"}; }
  if (told.state) show(told.state);
  say(told.error, told.done);
  return told.error === undefined && told.done.ok;
}
function say(error, done) {
  $("error").textContent = error ?? "";
  $("answer").textContent = done?.said ?? "";
  $("answer").className = "readout " + (done ? (done.ok ? "yes" : "no") : "");
  document.body.dataset.answers = 1 + Number(document.body.dataset.answers ?? 0);
}
const send = (command) => ask("command", JSON.stringify(command));
const tokens = (id) => {
  const text = $(id).value;
  if ($("kind").value === "text") return {text};
  return {tokens: text.split(/[\s,]+/).filter((word) => word !== "").map((word) => (/^\d+$/.test(word) ? Number(word) : word))};
};
const COMMANDS = {
  lookup: () => ({op: "lookup", seq: number("seq"), ...tokens("prompt"), salt: $("salt").value || undefined, priority: number("priority") || undefined}),
  allocate: () => ({op: "allocate", seq: number("seq"), count: number("count")}),
  fill: () => ({op: "fill", seq: number("seq"), count: number("count")}),
  index: () => ({op: "index", seq: number("seq")}),
  write: () => ({op: "write", seq: number("seq"), ...tokens("more")}),
  fork: () => ({op: "fork", seq: number("seq"), child: number("child")}),
  free: () => ({op: "free", seq: number("seq")}),
  swap_out: () => ({op: "swap_out", seq: number("seq")}),
  swap_in: () => ({op: "swap_in", seq: number("seq")}),
  evict: () => ({op: "evict", count: number("number")}),
  truncate: () => ({op: "truncate", seq: number("seq"), count: number("number")}),
  reset: () => ({op: "reset", mode: $("preempt").checked ? "preempt" : "strict"}),
};
for (const [op, command] of Object.entries(COMMANDS))
  if ($(op).type === "submit") $(op).form.addEventListener("submit", (e) => { e.preventDefault(); send(command()); });
  else $(op).addEventListener("click", () => send(command()));
$("serve").addEventListener("click", async () => {
  for (const op of ["lookup", "allocate", "fill", "index"]) if (!(await send(COMMANDS[op]()))) return;
});
$("prompt").addEventListener("keydown", (e) => { if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); $("serve").click(); } });
$("undo").addEventListener("click", () => ask("undo"));
$("restart").addEventListener("click", () => { if (!state?.history.total || confirm("Forget every command? Save the history first if you want to keep it.")) ask("restart"); });
$("file").addEventListener("change", async () => { const file = $("file").files[0]; if (file) { await ask("load", file); $("file").value = ""; } });
$("settings").addEventListener("submit", (e) => {
  e.preventDefault();
  const values = {};
  for (const field of $("fields").querySelectorAll("[name]")) {
    const value = field.type === "checkbox" ? field.checked : field.type === "number" ? Number(field.value) : field.value;
    if (String(value) !== plain(state.settings[field.name])) values[field.name] = value;
  }
  if (Object.keys(values).length) send({op: "settings", values});
  else say("settings: all are as they were; change one first");
});
$("seq").addEventListener("input", draw);

/* ------------------------------------------------------------------ what is shown */
function show(next) {
  if (state && next.revision <= state.revision) return;
  const anew = !grid || grid.size !== next.pool.num_blocks;
  state = next;
  if (anew) makeGrid();
  draw(); drawSequences(); drawSettings(); drawHistory();
  $("stats").replaceChildren();
  for (const [name, value] of Object.entries(state.stats)) {
    const line = make("div", undefined, $("stats"));
    make("dt", name.replaceAll("_", " "), line);
    const text = typeof value === "object" ? Object.entries(value).map(([k, n]) => `${k} ${n}`).join(", ") || "none" : value;
    make("dd", text, line).dataset.stat = JSON.stringify([name, value]);
  }
  document.body.dataset.revision = state.revision;
}
function makeGrid() {
  box.replaceChildren();
  pointed = 0;
  grid = new BlockGrid(box, state.pool.num_blocks, "of the chosen sequence");
  grid.canvas.addEventListener("mousemove", (e) => point(grid.at(e)));
  grid.canvas.addEventListener("mouseleave", () => point(0));
  grid.canvas.addEventListener("click", (e) => choose(grid.at(e)));
  grid.canvas.addEventListener("keydown", (e) => {
    const by = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns, Home: -1e9, End: 1e9}[e.key];
    if (by !== undefined) { e.preventDefault(); point(clip(pointed + by, 1, state.pool.num_blocks - 1)); }
    else if (e.key === "Enter" && pointed) choose(pointed);
  });
}
const stateName = (b) => STATES[stateOf(state.pool.ref[b] ?? 0, b in state.pool.keys)];
function holders(b) { return Object.entries(state.tables).filter(([seq, table]) => table.includes(b) && !found(seq)).map(([seq]) => seq); }
const found = (seq) => state.sequences.some((s) => s.seq === Number(seq) && s.state === "looked up");
function point(b) {
  pointed = b;
  if (!b) { grid.readout.textContent = ""; return; }
  const key = state.pool.keys[b], who = holders(b);
  grid.readout.textContent = `block ${b}: ${stateName(b)}, ${state.pool.ref[b] ?? 0} owners${who.length ? " (sequence " + who.join(", ") + ")" : ""}` +
    (state.pool.waiting.includes(b) ? ", waits for a copy that reads it" : "") + `\ncontent ${key ? key.slice(0, 12) + " " + (state.content[key] ?? "") : "not indexed"}`;
}
function choose(b) { const [seq] = holders(b); if (seq !== undefined) { $("seq").value = seq; draw(); drawSequences(); } }
function draw() {
  if (!state) return;
  const pool = state.pool, size = pool.num_blocks, counts = [0, 0, 0, 0];
  const chosen = new Set((state.tables[$("seq").value] ?? []).filter((b) => b > 0));
  const of = (b) => stateOf(pool.ref[b] ?? 0, b in pool.keys);
  for (let b = 1; b < size; b++) counts[of(b)]++;
  grid.draw(of, chosen, 28);
  const text = STATES.map((name, i) => `${name} ${counts[i]}`).join("   ");
  grid.canvas.setAttribute("aria-label", "pool: " + text);
  $("totals").textContent = `${text}   free ${pool.free_queue.length} (${pool.num_blank} blank, ${pool.num_evictable} cached)` +
    (pool.waiting.length ? `   ${pool.waiting.length} wait for a copy that reads them` : "");
  $("totals").dataset.blank = pool.num_blank; $("totals").dataset.evictable = pool.num_evictable;
  $("queue").textContent = "handed out next: " + (pool.free_queue.slice(0, 64).join(" ") || "none") + (pool.free_queue.length > 64 ? " …" : "");
  $("queue").dataset.queue = pool.free_queue.join(" ");
  $("blocks").replaceChildren();
  for (let b = 1; b < size; b++) {
    const owners = pool.ref[b] ?? 0, key = pool.keys[b];
    if (!owners && key === undefined) continue;
    const row = make("tr", undefined, $("blocks"));
    row.dataset.block = b; row.dataset.owners = owners; row.dataset.key = key ?? "";
    for (const cell of [b, stateName(b), owners, holders(b).join(", "), key ? key.slice(0, 8) : "not indexed"]) make("td", cell, row);
    make("td", key ? state.content[key] ?? "" : "", row).className = "text";
  }
  for (const node of $("sequences").children) node.setAttribute("aria-current", node.dataset.seq === $("seq").value);
}
function drawSequences() {
  $("sequences").replaceChildren();
  const known = new Map(state.sequences.map((s) => [s.seq, s]));
  if (!known.size) make("p", "None yet: look a prompt up.", $("sequences"));
  for (const s of state.sequences) {
    const node = make("div", undefined, $("sequences")), table = state.tables[s.seq] ?? [], size = state.settings.block_size;
    node.className = "seq"; node.dataset.seq = s.seq; node.dataset.table = JSON.stringify(s.seq in state.tables ? table : null);
    node.setAttribute("aria-current", String(s.seq) === $("seq").value);
    const what = `sequence ${s.seq}: ${s.state}, ${s.tokens} tokens, ${s.filled} filled, ${s.indexed} committed` +
      (s.hit === null ? `, forked from ${s.parent}` : `, ${s.hit} from the cache (${s.reason})`) + (s.copies ? `, ${s.copies} copies` : "") + (s.salt === null ? "" : `, salt ${s.salt}`);
    make("div", what, node);
    const list = make("ul", undefined, node); list.className = "pieces";
    for (let i = 0; i < Math.max(s.pieces.length, Math.min(table.length, 256)); i++) {
      const piece = make("li", undefined, list), b = table[i], first = i * size;
      piece.className = "piece";
      piece.dataset.state = b === undefined ? "none" : s.state === "looked up" ? "found" : stateName(b);
      piece.dataset.written = first + size <= s.indexed ? "indexed" : first < s.filled ? "filled" : "coming";
      make("b", b === undefined ? "no block" : b < 0 ? `host ${-1 - b}` : `block ${b}`, piece);
      make("code", s.pieces[i] ?? "", piece);
    }
    if (s.tokens > s.pieces.length * size) make("div", `… and ${s.tokens - s.pieces.length * size} tokens more`, node);
  }
}
const plain = (value) => (value === null ? "auto" : String(value));
let settled = "";
function drawSettings() {
  if (JSON.stringify(state.settings) === settled) return; // what somebody is typing stays
  settled = JSON.stringify(state.settings);
  $("fields").replaceChildren();
  for (const [name, value] of Object.entries(state.settings)) {
    const label = make("label", name.replaceAll("_", " ") + " ", $("fields"));
    const options = state.choices[name] ?? (name === "dedup" ? ["auto", "true", "false"] : null);
    const field = make(options ? "select" : "input", undefined, label);
    field.name = name; field.id = "set-" + name;
    if (options) { for (const option of options) make("option", option, field).value = option; field.value = plain(value); }
    else if (typeof value === "boolean") { field.type = "checkbox"; field.checked = value; }
    else { field.type = "number"; field.min = 0; field.className = "small"; field.value = value; }
  }
}
function drawHistory() {
  const {lines, total} = state.history, list = $("history");
  list.replaceChildren();
  for (const [n, command, ok, said] of lines) {
    const line = make("li", (ok ? "" : "✗ ") + command + " ", list);
    line.value = n; line.dataset.ok = ok;
    make("span", said, line);
  }
  if (!total) make("li", "nothing yet", list);
  list.scrollTop = list.scrollHeight;
  $("undo").disabled = !total;
}

/* ------------------------------------------------------------------ every tab is told */
function listen() {
  stream = new EventSource("events");
  stream.addEventListener("open", () => { $("line").textContent = "Connected."; });
  stream.addEventListener("message", (e) => { show(JSON.parse(e.data)); document.body.dataset.ready = "yes"; });
  stream.addEventListener("error", () => {
    $("line").textContent = stream.readyState === EventSource.CLOSED
      ? "Not told of other tabs' commands: too many tabs look on, close one and reload." : "Not connected: pagedjax explore has ended, or this machine is busy.";
  });
}
addEventListener("resize", draw);
addEventListener("pagehide", () => stream.close());
addEventListener("pageshow", (e) => { if (e.persisted) listen(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
listen();
