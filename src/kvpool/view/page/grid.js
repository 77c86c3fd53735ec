// The blocks of one pool as a grid on a canvas: one pixel a block in memory, enlarged without smoothing.

import { FREE, stateOf } from "/view/store.js";

const LARGEST = 40, SMALLEST = 2; // pixels of the screen that a block takes

const FEWEST = 64;

// How many blocks to draw, so that all used ones are large: up to the last used one and some more. The others are free.
// What was drawn before stays, unless it is too little or far too much.
export function drawnBlocks(high, before) {
  let used = high.length;
  while (used > 0 && stateOf(high[used - 1]) === FREE) used--;
  if (before && used <= before && 4 * used >= before) return before;
  let count = FEWEST;
  while (count < used * 1.1) count = Math.ceil(count * 1.4);
  return Math.min(high.length, count);
}

export class Grid {
  // `on.move(id)` is told where the cursor is, `on.choose(id)` what was clicked or entered.
  constructor(canvas, name, colours, on) {
    Object.assign(this, { canvas, name, colours, on });
    this.context = canvas.getContext("2d", { alpha: false });
    this.small = document.createElement("canvas");
    this.cursor = -1;
    this.blocks = 0;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.on.move(-1));
    canvas.addEventListener("click", (event) => {
      const id = this.#at(event);
      if (id >= 0) this.#go(id, true);
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => this.draw());
  }

  // Chooses the size of a block so that the first `blocks` fill `width` by `height` (in CSS pixels).
  fit(blocks, width, height) {
    const scale = devicePixelRatio || 1;
    const wide = Math.max(1, Math.floor(width * scale)), high = Math.max(1, Math.floor(height * scale));
    let cell = Math.max(SMALLEST, Math.min(Math.floor(LARGEST * scale), Math.floor(Math.sqrt((wide * high) / Math.max(blocks, 1)))));
    while (cell > SMALLEST && Math.ceil(blocks / Math.floor(wide / cell)) * cell > high) cell--;
    this.blocks = blocks;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(wide / cell));
    this.rows = Math.max(1, Math.ceil(blocks / this.columns));
    this.small.width = this.columns;
    this.small.height = this.rows;
    this.smallContext = this.small.getContext("2d");
    this.image = this.smallContext.createImageData(this.columns, this.rows);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.canvas.width = this.columns * cell;
    this.canvas.height = this.rows * cell;
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
  }

  show(pool, now, chosen) {
    Object.assign(this, { pool, now, chosen });
    this.draw();
  }

  draw() {
    const { context, cell, columns, rows, blocks, pool } = this;
    if (!pool || pool.high.length < blocks) return;
    this.colours.paint(pool, this.pixels, this.now, this.chosen, blocks);
    this.smallContext.putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.fillStyle = this.colours.css.card;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.small, 0, 0, columns, rows, 0, 0, columns * cell, rows * cell);
    context.fillStyle = this.colours.css.card;
    if (cell >= 4) {
      const gap = cell >= 9 ? 2 : 1;
      for (let column = 0; column <= columns; column++) context.fillRect(column * cell - gap + 1, 0, gap, rows * cell);
      for (let row = 0; row <= rows; row++) context.fillRect(0, row * cell - gap + 1, columns * cell, gap);
    }
    const rest = columns * rows - blocks;
    if (rest) context.fillRect((columns - rest) * cell, (rows - 1) * cell, rest * cell, cell);
    if (this.cursor >= 0 && (document.activeElement === this.canvas || this.isMarked)) this.#frame(this.cursor);
  }

  #frame(id) {
    const { context, cell, columns } = this;
    const x = (id % columns) * cell, y = Math.floor(id / columns) * cell, around = Math.max(3, Math.floor(cell / 3));
    context.lineWidth = Math.max(2, Math.floor(cell / 5));
    context.strokeStyle = this.colours.css.card;
    context.strokeRect(x - around - 1, y - around - 1, cell + 2 * around + 2, cell + 2 * around + 2);
    context.strokeStyle = this.colours.css.text;
    context.strokeRect(x - around + 1, y - around + 1, cell + 2 * around - 2, cell + 2 * around - 2);
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
    const id = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && id < this.blocks ? id : -1;
  }

  #point(event) {
    this.on.move(this.#at(event));
  }

  #key(event) {
    const steps = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns,
      PageUp: -10 * this.columns, PageDown: 10 * this.columns, Home: -Infinity, End: Infinity,
    };
    if (event.key === "Enter" || event.key === " ") this.#go(Math.max(this.cursor, 0), true);
    else if (event.key in steps) {
      const from = this.cursor < 0 ? (steps[event.key] > 0 ? -1 : 0) : this.cursor;
      this.#go(Math.max(0, Math.min(this.blocks - 1, this.cursor < 0 ? 0 : from + steps[event.key])), false);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #go(id, choose) {
    this.cursor = id;
    this.on.move(id, true);
    if (choose) this.on.choose(id);
    this.draw();
  }
}
