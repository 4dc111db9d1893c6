"use strict";
/* Used by every page over a pool, before its own script: small tools, and the grid of the blocks. */
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const clip = (x, low, high) => Math.min(Math.max(x, low), high);

const STATES = ["blank", "one owner", "shared", "cached"];
const COLOURS = ["--blank", "--one", "--shared", "--cached"];
const MOST_CELLS = 4096;
const stateOf = (owners, indexed) => (owners > 1 ? 2 : owners === 1 ? 1 : indexed ? 3 : 0);

/* One cell of the grid; states differ by shape as well as colour. */
function paintCell(g, x, y, side, state, lit, colours) {
  const w = side - 1;
  g.fillStyle = colours.states[state];
  g.fillRect(x, y, w, w);
  if (state === 3 && side > 5) { g.fillStyle = colours.ground; g.fillRect(x + 2, y + 2, w - 4, w - 4); }
  if (state === 2 && side > 5) { g.fillStyle = colours.ground; g.fillRect(x + w / 2 - 1, y + w / 2 - 1, 2, 2); }
  if (lit) { g.fillStyle = colours.lit; g.beginPath(); g.moveTo(x + w / 2, y); g.lineTo(x + w, y + w / 2); g.lineTo(x + w / 2, y + w); g.lineTo(x, y + w / 2); g.fill(); }
}

class BlockGrid {
  /* Canvas, a line of text and the legend in `root`; blocks 1 to size - 1, several to a cell where they are many. */
  constructor(root, size, chosenText) {
    this.root = root;
    this.size = size;
    this.perCell = Math.ceil((size - 1) / MOST_CELLS);
    this.cells = Math.ceil((size - 1) / this.perCell);
    this.side = 10;
    this.columns = 1;
    this.canvas = make("canvas", undefined, root);
    this.canvas.tabIndex = 0; this.canvas.setAttribute("role", "img");
    this.readout = make("div", undefined, root); this.readout.className = "readout";
    this.readout.setAttribute("aria-live", "polite");
    const legend = make("ul", undefined, root); legend.className = "legend";
    for (const [i, mark] of ["· blank", "▪ one owner", "▦ shared (dot in the middle)", "◻ cached, no owner (hollow)"].entries())
      make("li", mark, legend).dataset.state = STATES[i];
    make("li", "◆ " + chosenText, legend);
    if (this.perCell > 1) make("li", `each cell stands for ${this.perCell} blocks; its state is that of most of them`, legend);
  }
  /* state: block → index into STATES; chosen: blocks to mark. */
  draw(state, chosen, most = 18) {
    const width = this.root.clientWidth - 4, side = clip(Math.floor(Math.sqrt(width * 320 / this.cells)), 4, most);
    this.side = side;
    this.columns = Math.max(1, Math.floor(width / side));
    const rows = Math.ceil(this.cells / this.columns), scale = window.devicePixelRatio || 1, canvas = this.canvas;
    canvas.width = this.columns * side * scale; canvas.height = rows * side * scale;
    canvas.style.width = this.columns * side + "px"; canvas.style.height = rows * side + "px";
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    const colours = {states: COLOURS.map(css), lit: css("--lit"), ground: css("--bg")};
    for (let c = 0; c < this.cells; c++) {
      const count = [0, 0, 0, 0];
      let lit = false;
      for (let b = 1 + c * this.perCell; b < Math.min(1 + (c + 1) * this.perCell, this.size); b++) { count[state(b)]++; lit ||= chosen.has(b); }
      paintCell(g, (c % this.columns) * side, Math.floor(c / this.columns) * side, side, count.indexOf(Math.max(...count)), lit, colours);
    }
  }
  /* First block of the cell under the pointer; 0: none. */
  at(event) {
    const c = Math.floor(event.offsetY / this.side) * this.columns + Math.floor(event.offsetX / this.side);
    return c < 0 || c >= this.cells || event.offsetX >= this.columns * this.side ? 0 : 1 + c * this.perCell;
  }
}
