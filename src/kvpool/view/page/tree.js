// The prefix tree as a flame graph: a run is as wide as what it and its continuations hold, its children stand below it.

import { many } from "/view/panels.js";

const ROW = 22;
const MOST_ROWS = 14;

export class Tree {
  constructor(canvas, colours, on) {
    Object.assign(this, { canvas, colours, on, boxes: [], cursor: -1, tree: null, chosen: null, width: 0, height: 0 });
    this.context = canvas.getContext("2d");
    new ResizeObserver(() => { // told, not asked: asking makes the browser lay the page out at once
      Object.assign(this, { width: canvas.clientWidth, height: canvas.clientHeight });
      this.draw();
    }).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.on.move(this.#at(event)));
    canvas.addEventListener("pointerleave", () => this.on.move(-1));
    canvas.addEventListener("click", (event) => {
      const run = this.#at(event);
      if (run >= 0) this.#go(run, true);
    });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => this.draw());
  }

  // Draws the tree if it, or what its picture depends on, is not what it was; `runs()` are those that stay bright.
  show(tree, tenants, selected, runs) {
    const { colours } = this;
    const look = [tree, tenants.length, selected, colours.mode, colours.css.card, devicePixelRatio];
    if (this.look?.every((part, place) => part === look[place])) return;
    if (tree !== this.tree) this.cursor = Math.min(this.cursor, tree ? tree.number.length - 1 : -1);
    Object.assign(this, { look, tree, tenants, chosen: selected?.kind === "run" ? runs() : null });
    const rows = Math.max(3, Math.min(MOST_ROWS, tree?.depth ?? 0)); // scopes are the first
    this.canvas.style.height = `${rows * ROW}px`;
    this.height = rows * ROW;
    this.draw();
  }

  draw() {
    const { canvas, context, tree, width, height } = this;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    this.boxes = [];
    if (!tree || !tree.number.length) {
      context.fillStyle = this.colours.css.muted;
      context.font = "13px system-ui, sans-serif";
      context.fillText("nothing is cached yet", 8, 24);
      return;
    }
    this.#place(width);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const box of this.boxes) this.#box(box);
    const at = this.boxes.find((box) => box.run === this.cursor);
    if (at && document.activeElement === canvas) {
      context.lineWidth = 2;
      context.strokeStyle = this.colours.css.text;
      context.strokeRect(at.x + 1, at.y + 1, Math.max(at.width - 2, 3), ROW - 3);
    }
  }

  // Rows of boxes from the scopes down; what is narrower than half a pixel is left out.
  #place(width) {
    const { tree } = this;
    const scopes = new Map();
    for (let run = 0; run < tree.number.length; run++)
      if (tree.parent[run] < 0) {
        if (!scopes.has(tree.scope[run])) scopes.set(tree.scope[run], { tenant: tree.tenant[run], runs: [], weight: 0 });
        const scope = scopes.get(tree.scope[run]);
        scope.runs.push(run);
        scope.weight += tree.weight[run];
      }
    const all = [...scopes.values()].sort((one, other) => other.weight - one.weight);
    const total = all.reduce((sum, scope) => sum + scope.weight, 0);
    let x = 0;
    for (const scope of all) {
      const wide = (scope.weight / total) * width;
      if (wide > 0.5) this.boxes.push({ run: -1, scope, x, y: 0, width: wide });
      this.#children(scope.runs, x, wide / scope.weight, 1);
      x += wide;
    }
  }

  #children(runs, left, perBlock, row) {
    if (row >= Math.min(MOST_ROWS, Math.floor(this.height / ROW))) return;
    let x = left;
    for (const run of [...runs].sort((one, other) => this.tree.weight[other] - this.tree.weight[one])) {
      const width = this.tree.weight[run] * perBlock;
      if (width > 0.5) {
        this.boxes.push({ run, x, y: row * ROW, width });
        this.#children(this.tree.children[run], x, perBlock, row + 1);
      }
      x += width;
    }
  }

  #box({ run, scope, x, y, width }) {
    const { context, tree, colours } = this;
    const wide = width > 4 ? width - 1 : width;
    const faded = this.chosen && !this.chosen.has(run);
    context.globalAlpha = faded ? 0.25 : 1;
    context.fillStyle = run < 0 ? colours.tenant(scope.tenant) : this.#colour(run);
    context.fillRect(x, y, wide, ROW - 2);
    if (run >= 0 && tree.flags[run] & 3) { // below the GPU: a stripe says so
      context.fillStyle = colours.css.card;
      context.globalAlpha *= 0.5;
      context.fillRect(x, y + ROW - 7, wide, 5);
    }
    context.globalAlpha = faded ? 0.35 : 1;
    if (width > 34) {
      const words = run < 0 ? this.tenants[scope.tenant] || "no tenant" : width > 80 ? many(tree.blocks[run], "block") : `${tree.blocks[run]}`;
      context.fillStyle = "#fff";
      context.save();
      context.beginPath();
      context.rect(x, y, wide - 3, ROW);
      context.clip();
      context.fillText(words, x + 5, y + ROW / 2 - 0.5);
      context.restore();
    }
    context.globalAlpha = 1;
  }

  #colour(run) {
    const { tree, colours } = this;
    if (colours.mode === "tenant") return colours.tenant(tree.tenant[run]);
    if (colours.mode === "priority") return colours.priorities[Math.min(4, Math.floor(tree.priority[run] / 20))];
    if (tree.flags[run] & 8) return colours.css.used;
    return tree.flags[run] & 4 ? colours.css.pinned : colours.css.cached;
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    return this.boxes.find((one) => y >= one.y && y < one.y + ROW && x >= one.x && x < one.x + one.width)?.run ?? -1;
  }

  #key(event) {
    const { tree } = this;
    if (!tree?.number.length) return;
    const drawn = this.boxes.filter((box) => box.run >= 0);
    const here = drawn.find((box) => box.run === this.cursor);
    const beside = here && drawn.filter((box) => box.y === here.y).sort((one, other) => one.x - other.x);
    let next = null;
    if (event.key === "Enter" || event.key === " ") next = here;
    else if (!here && event.key.startsWith("Arrow")) next = drawn[0];
    else if (event.key === "ArrowLeft") next = beside[beside.indexOf(here) - 1];
    else if (event.key === "ArrowRight") next = beside[beside.indexOf(here) + 1];
    else if (event.key === "ArrowUp") next = drawn.find((box) => box.run === tree.parent[this.cursor]);
    else if (event.key === "ArrowDown") next = drawn.find((box) => tree.parent[box.run] === this.cursor);
    else return;
    event.preventDefault();
    event.stopPropagation();
    if (next) this.#go(next.run, event.key === "Enter" || event.key === " ");
  }

  #go(run, choose) {
    this.cursor = run;
    this.on.move(run, true);
    if (choose) this.on.choose(run);
    this.draw();
  }
}
