// The page's copy of the cache: frames change it, and the last minutes can be shown again.
//
// A word of a block is two numbers: `low` says when a cached block was last used, `high` holds 3 bits of state, 5 of holders,
// 8 of priority and 16 of the tenant's number (kvpool/view/sampling.py).

import { unpack } from "/view/stream.js";

export const FREE = 0, REFERENCED = 1, CACHED = 2, PINNED = 3;
export const stateOf = (high) => high & 7;
export const holdersOf = (high) => (high >>> 3) & 31;
export const priorityOf = (high) => (high >>> 8) & 255;
export const tenantOf = (high) => high >>> 16;

const MOST_FRAMES = 1800; // three minutes at ten a second
const WHOLE_EVERY = 100; // frames from one full copy of the blocks to the next
const MOST_EVENTS = 200;

const EMPTY = {
  tenants: [""], counts: {}, sequences: [], numSequences: 0, tables: new Map(), tree: null, more: {}, events: [],
  pools: [],
};

export class Store {
  constructor() {
    this.pools = new Map(); // name -> { low, high }: as it is now
    this.now = EMPTY; // everything else, as it is now; replaced, never changed
    this.frames = []; // { time, number, now, changes, whole }
    this.seen = 0; // all that ever came
    this.numEvents = 0;
  }

  // Takes a frame in; returns the names of pools that changed their size.
  apply(frame) {
    const snapshot = frame.after === null;
    if (!snapshot && this.frames.length && this.frames.at(-1).number !== frame.after) throw new Error("a frame is missing");
    const resized = [];
    const changes = [];
    for (const told of frame.pools) {
      const name = `${told.tier}/${told.pool}`;
      let pool = this.pools.get(name);
      if (!pool || pool.high.length !== told.blocks || snapshot) {
        if (!pool || pool.high.length !== told.blocks) resized.push(name);
        pool = { low: new Uint32Array(told.blocks), high: new Uint32Array(told.blocks), heat: new Uint8Array(told.blocks) };
        this.pools.set(name, pool);
      }
      if (told.spans) {
        const change = {
          name, start: unpack(told.spans.start, Uint32Array), length: unpack(told.spans.length, Uint32Array),
          word: unpack(told.spans.word, Uint32Array),
        };
        changes.push(change);
        for (let place = 0; place < pool.heat.length; place++) if (pool.heat[place]) pool.heat[place]--;
        paint(pool, change, snapshot ? 0 : 2);
      } else pool.heat.fill(0);
    }
    this.now = this.#rest(frame);
    const whole = snapshot || resized.length || this.seen % WHOLE_EVERY === 0;
    this.frames.push({
      time: Date.now(), number: frame.number, now: frame.now, changes, rest: this.now,
      whole: whole ? this.#copy() : null,
    });
    this.seen++;
    if (this.frames.length > MOST_FRAMES) this.#forget();
    return resized;
  }

  #rest(frame) {
    const old = frame.after === null ? EMPTY : this.now;
    let tables = old.tables;
    if (frame.sequences) {
      tables = new Map();
      for (const [serial] of frame.sequences) {
        const told = frame.tables[serial];
        tables.set(serial, told ?? old.tables.get(serial) ?? []);
      }
    }
    let events = this.now.events;
    if (frame.events) {
      this.numEvents += frame.num_events;
      events = [...frame.events.reverse(), ...events].slice(0, MOST_EVENTS);
    }
    return {
      tenants: frame.tenants ?? old.tenants,
      counts: frame.counts ?? old.counts,
      sequences: frame.sequences ?? old.sequences,
      numSequences: frame.num_sequences ?? old.numSequences,
      tables,
      tree: frame.tree ? unpackTree(frame.tree) : old.tree,
      more: frame.more ?? old.more,
      events,
      pools: frame.pools.map(({ spans, ...told }) => told),
    };
  }

  #copy() {
    return new Map([...this.pools].map(([name, pool]) => [name, { low: pool.low.slice(), high: pool.high.slice() }]));
  }

  #forget() {
    // the oldest frame that is left must have a full copy, from which the next ones follow
    const next = this.frames.findIndex((frame, place) => place > 0 && frame.whole);
    if (next > 0) this.frames.splice(0, next);
  }

  // The blocks as they were after frame `place` of those that are kept.
  blocksAt(place) {
    let from = place;
    while (!this.frames[from].whole) from--;
    const pools = new Map(
      [...this.frames[from].whole].map(([name, pool]) => [
        name, { low: pool.low.slice(), high: pool.high.slice(), heat: new Uint8Array(pool.low.length) },
      ]),
    );
    for (let step = from + 1; step <= place; step++)
      for (const change of this.frames[step].changes) paint(pools.get(change.name), change, step === place ? 2 : 0);
    return pools;
  }
}

function paint(pool, { start, length, word }, heat) {
  const { low, high } = pool;
  for (let span = 0; span < start.length; span++) {
    const first = start[span], end = first + length[span];
    low.fill(word[2 * span], first, end);
    high.fill(word[2 * span + 1], first, end);
    if (heat) pool.heat.fill(heat, first, end);
  }
}

function unpackTree(told) {
  const tree = {
    numRuns: told.num_runs,
    number: unpack(told.number, Uint32Array), start: unpack(told.start, Uint32Array),
    blocks: unpack(told.blocks, Uint32Array), parent: unpack(told.parent, Int32Array),
    scope: unpack(told.scope, Uint32Array), tenant: unpack(told.tenant, Uint16Array),
    priority: unpack(told.priority, Uint8Array), flags: unpack(told.flags, Uint8Array),
    hits: unpack(told.hits, Uint32Array), ids: unpack(told.ids, Int32Array), idsAt: unpack(told.ids_at, Uint32Array),
  };
  const count = tree.number.length;
  tree.children = Array.from({ length: count }, () => []);
  tree.weight = Float64Array.from(tree.blocks);
  for (let run = count - 1; run >= 0; run--) if (tree.parent[run] >= 0) tree.weight[tree.parent[run]] += tree.weight[run];
  const level = new Uint32Array(count); // rows below the scope
  tree.depth = 0;
  for (let run = 0; run < count; run++) {
    if (tree.parent[run] >= 0) tree.children[tree.parent[run]].push(run);
    level[run] = tree.parent[run] >= 0 ? level[tree.parent[run]] + 1 : 1;
    tree.depth = Math.max(tree.depth, level[run] + 1);
  }
  return tree;
}

// The block tables of a request, one for each layer group; they stay packed until somebody looks.
export function tablesOf(rest, serial) {
  return (rest.tables.get(serial) ?? []).map((text) => unpack(text, Int32Array));
}

// The block ids of a table, or of a run, from pairs (first, how many).
export function eachId(pairs, call) {
  for (let place = 0; place < pairs.length; place += 2)
    if (pairs[place] >= 0) for (let step = 0; step < pairs[place + 1]; step++) call(pairs[place] + step);
}
