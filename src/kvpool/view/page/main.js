// Joins the stream, the copy of the cache and everything that shows it.

import { Charts } from "/view/charts.js";
import { Chat } from "/view/chat.js";
import { Colours, describe } from "/view/colours.js";
import { Grid, drawnBlocks } from "/view/grid.js";
import { element, facts, many, maskOf, missedOf, showEvents, showFlow, showKeyedTiers, showMissed, showRequests, showSessions, showTiles, tableWords } from "/view/panels.js";
import { Store, tablesOf } from "/view/store.js";
import { askForKey, follow, headers, status } from "/view/stream.js";
import { Tree } from "/view/tree.js";

const TIERS = ["GPU", "HOST", "DISK"];
const NAMES = { GPU: "GPU", HOST: "Host", DISK: "Disk", REMOTE: "Remote" };
const tierName = (tier) => (tier === "GPU" ? about.device ?? NAMES.GPU : NAMES[tier]); // the pool of a CPU is called GPU, too
const LISTS_EVERY = 250; // milliseconds between two drawings of lists; the grid follows every frame
const ASK_EVERY = 1000; // the same of a selected block, about which the server is asked
const CHARTS_EVERY = 900; // the same of charts, which tell of minutes
const find = (id) => document.getElementById(id);

const colours = new Colours();
let store = new Store();
let following = new AbortController();
let about = {};
let paused = null; // null while live, else the place of the frame that is shown
let shownBlocks = null; // of a paused frame
let selected = null; // { kind: "block" | "request" | "run", ... }
let wanted = false; // a drawing is due
let listsDrawn = 0, chartsDrawn = 0, asked = 0, skipped = 0;
const grids = new Map();
const drawn = { frames: 0, milliseconds: 0, stamps: [] };

const place = () => (paused === null ? store.frames.length - 1 : paused);
const shown = () => store.frames[place()];
const blocks = () => shownBlocks ?? store.pools;
const path = (name, query = {}) => `/view/${name}?${new URLSearchParams({ ...(about.model ? { model: about.model } : {}), ...query })}`;

// --- layout of the pools -------------------------------------------------------------------------------------------------

function layOut() {
  const pools = shown()?.rest.pools ?? [];
  const tiers = TIERS.filter((tier) => pools.some((pool) => pool.tier === tier && pool.blocks));
  const parts = [];
  grids.clear();
  const most = Math.max(...pools.map((pool) => pool.blocks), 1);
  tiers.forEach((tier, number) => {
    if (number) parts.push(flowBetween(tiers[number - 1], tier));
    const own = pools.filter((pool) => pool.tier === tier && pool.blocks);
    const column = element("div", { className: "tier" });
    column.style.setProperty("--share", String(Math.max(0.25, Math.max(...own.map((pool) => pool.blocks)) / most)));
    column.append(element("h3", { textContent: tierName(tier) }));
    for (const pool of own) column.append(poolPart(pool, own.length));
    parts.push(column);
  });
  find("tiers").replaceChildren(...parts);
  fit();
}

function poolPart(pool, several) {
  const name = `${pool.tier}/${pool.pool}`;
  const canvas = element("canvas", { tabIndex: 0 });
  const label = `${tierName(pool.tier)}, pool ${pool.pool}: ${pool.blocks.toLocaleString("en")} blocks`;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "grid of blocks");
  canvas.setAttribute("aria-label", `${label}; arrow keys move, Enter asks about a block`);
  const count = element("p", { className: "count" });
  const grid = new Grid(canvas, name, colours, {
    move: (id, spoken) => point(name, id, spoken),
    choose: (id) => select({ kind: "block", name, pool: pool.pool, tier: pool.tier, id }),
  });
  grids.set(name, { grid, count, prefix: several > 1 ? `pool ${pool.pool}: ` : "", size: 0 });
  return element("div", { className: "pool" }, canvas, count);
}

function flowBetween(upper, lower) {
  const line = (name, words, sign) => element("div", { className: name },
    element("span", { className: "track", ariaHidden: "true" }),
    element("span", { className: "words" }, `${sign} `, element("b", { textContent: "0" }), ` /s ${words}`));
  const flow = element("div", { className: "flow" }, line("down", "put away", "→"), line("up", "brought up", "←"));
  flow.setAttribute("aria-label", `Blocks between ${tierName(upper)} and ${tierName(lower)}`);
  flow.setAttribute("role", "group");
  return flow;
}

function fit() {
  const tall = matchMedia("(max-width: 800px)").matches;
  for (const [name, entry] of grids) {
    const grid = entry.grid;
    resize(name, entry);
    const column = grid.canvas.closest(".tier");
    const pools = column.querySelectorAll(".pool").length;
    const height = tall ? (name.startsWith("GPU") ? 300 : 170) : Math.max(420, Math.min(innerHeight - 330, 620));
    grid.fit(entry.size, column.clientWidth, (height - 40) / pools - 24);
  }
}

// Draws fewer or more blocks of a pool if that shows what is used better; whether it did.
function resize(name, entry) {
  const size = drawnBlocks(blocks().get(name).high, entry.size);
  const changed = size !== entry.size;
  entry.size = size;
  return changed;
}

// --- drawing -------------------------------------------------------------------------------------------------------------

function draw() {
  wanted = false;
  const frame = shown();
  if (!frame) return;
  const began = performance.now();
  const lit = litBlocks(frame);
  if ([...grids].filter(([name, entry]) => resize(name, entry)).length) fit();
  for (const [name, { grid, count, prefix, size }] of grids) {
    const told = frame.rest.pools.find((pool) => `${pool.tier}/${pool.pool}` === name);
    if (!told) continue;
    grid.isMarked = selected?.kind === "block" && selected.name === name;
    grid.show(blocks().get(name), frame.now, lit ? lit.get(name) ?? new Uint8Array(told.blocks) : null);
    const free = told.blocks - told.referenced - told.cached;
    const words = `${prefix}${told.referenced.toLocaleString("en")} in use · ${told.cached.toLocaleString("en")} cached · ${free.toLocaleString("en")} free${size < told.blocks ? `, ${(told.blocks - size).toLocaleString("en")} of them not drawn` : ""}`;
    if (count.textContent !== words) count.textContent = words;
  }
  drawn.frames++;
  drawn.milliseconds += performance.now() - began;
  drawn.stamps.push(began);
  while (drawn.stamps[0] < began - 2000) drawn.stamps.shift();
  if (began - listsDrawn > LISTS_EVERY || paused !== null) {
    listsDrawn = began;
    drawLists(frame);
  }
}

function drawLists(frame) {
  showTiles(find("tiles"), store.frames, place());
  showRequests(find("request-list"), find("requests-count"), frame.rest, colours, selected?.kind === "request" ? selected.serial : null,
    (one) => select({ kind: "request", ...one }));
  showKeyedTiers(find("keyed"), find("keyed-list"), frame.rest.more.tiers ?? [], colours);
  showSessions(find("sessions"), find("session-list"), frame.rest.more.sessions ?? []);
  showMissed(find("missed"), find("missed-list"), find("missed-count"), frame.rest.more.missed);
  showEvents(find("event-list"), find("events-count"), frame.rest.events, store.numEvents, tierName);
  for (const flow of document.querySelectorAll(".flow")) showFlow(flow, store.frames, place());
  const told = frame.rest.tree;
  tree.show(told, frame.rest.tenants, selected, () => runsOf(told));
  find("tree-count").textContent = told ? `${many(told.numRuns, "run")}${told.numRuns > told.number.length ? `, the ${told.number.length} nearest to the top` : ""}` : "";
  if (paused !== null || performance.now() - chartsDrawn > CHARTS_EVERY) {
    chartsDrawn = performance.now();
    charts.show(store.frames, place());
  }
  drawLegend(frame.rest.tenants);
  if (selected && (selected.kind !== "block" || paused !== null || performance.now() - asked > ASK_EVERY)) drawDetails();
  drawTime();
  const perFrame = drawn.milliseconds / Math.max(drawn.frames, 1);
  find("cost").textContent = `${(drawn.stamps.length / 2).toFixed(0)} frames/s, ${perFrame.toFixed(1)} ms each` + (skipped ? `, ${skipped} skipped` : "");
}

function drawLegend(tenants) {
  const items = colours.legend(tenants);
  const text = JSON.stringify(items);
  const list = find("legend");
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.replaceChildren(...items.map(([colour, words]) => {
    const swatch = element("i", { className: "swatch" });
    swatch.style.background = colour;
    return element("li", {}, swatch, words);
  }));
}

function soon() {
  if (!wanted) {
    wanted = true;
    requestAnimationFrame(draw);
  }
}

// --- selection -----------------------------------------------------------------------------------------------------------

// Masks of the blocks that belong to what is selected, by pool; null if all are equal.
function litBlocks(frame) {
  if (!selected || selected.kind === "block") return null;
  const masks = new Map();
  const size = (name) => blocks().get(name)?.high.length ?? 0;
  const add = (name, pairs) => {
    const mask = maskOf(pairs, size(name));
    const old = masks.get(name);
    masks.set(name, old ? old.map((value, id) => value | mask[id]) : mask);
  };
  if (selected.kind === "request") {
    const tables = tablesOf(frame.rest, selected.serial);
    const row = frame.rest.sequences.find(([serial]) => serial === selected.serial);
    if (!row) return null; // it has ended and holds nothing
    const groups = about.group_pools ?? [0];
    tables.forEach((pairs, group) => add(`${row[3] ? "HOST" : "GPU"}/${groups[group] ?? 0}`, pairs));
  } else {
    const told = frame.rest.tree;
    for (const run of runsOf(told) ?? []) {
      if (run < 0) continue;
      add(`${TIERS[told.flags[run] & 3]}/${(about.group_pools ?? [0])[0]}`, told.ids.subarray(2 * told.idsAt[run], 2 * told.idsAt[run + 1]));
    }
  }
  return masks;
}

// The selected run, those above it and those below it, in the tree as it is shown.
function runsOf(told) {
  if (!told || selected?.kind !== "run") return null;
  const at = told.number.findIndex((number, run) => number === selected.number && told.start[run] === selected.start);
  const found = new Set();
  if (at < 0) return found;
  for (let run = at; run >= 0; run = told.parent[run]) found.add(run);
  const below = [...told.children[at]];
  while (below.length) {
    const run = below.pop();
    found.add(run);
    below.push(...told.children[run]);
  }
  return found;
}

function select(what) {
  selected = selected?.kind === "request" && what?.kind === "request" && selected.serial === what.serial ? null : what;
  find("clear").hidden = !selected;
  drawDetails();
  listsDrawn = chartsDrawn = 0;
  soon();
}

async function drawDetails() {
  const target = find("details");
  const frame = shown();
  if (!selected) {
    target.replaceChildren(element("p", { className: "hint", textContent: "Click a block, a request or a run; in the grid, arrow keys move and Enter asks." }));
    return;
  }
  if (selected.kind === "request") {
    const tables = tablesOf(frame.rest, selected.serial);
    const live = frame.rest.sequences.find(([serial]) => serial === selected.serial);
    const row = live ?? selected.last; // what was last known of it
    selected.last = row;
    target.replaceChildren(
      element("h3", { textContent: `Request ${selected.name}` }),
      row ? facts([["state", live ? (row[3] ? "swapped" : row[6] < row[4] ? "prefill" : "decode") : "ended"], ["tenant", frame.rest.tenants[row[2]]], ["prompt", many(row[4], "token")], ["from the cache", many(row[5], "token")], ["missed", missedOf(row[8]).map(([tokens, words]) => `${tokens.toLocaleString("en")} ${words}`).join(", ")], ["written", many(row[6], "token")],
        ["places", row[7]], ...tables.map((pairs, group) => [tables.length > 1 ? `table ${group}` : "block table", element("code", { textContent: tableWords(pairs) })])])
        : element("p", { className: "hint", textContent: "It has ended." }));
    return;
  }
  if (selected.kind === "run") {
    const told = frame.rest.tree;
    const run = told ? told.number.findIndex((number, at) => number === selected.number && told.start[at] === selected.start) : -1;
    target.replaceChildren(element("h3", { textContent: "Cached run" }),
      run < 0 ? element("p", { className: "hint", textContent: "It is not cached any more." })
        : facts([["tenant", frame.rest.tenants[told.tenant[run]]], ["begins at", `token ${told.start[run] * about.block_size}`], ["blocks", told.blocks[run]],
          ["with what follows", many(told.weight[run], "block")], ["continued by", many(told.children[run].length, "run")], ["used again", many(told.hits[run], "time")],
          ["priority", told.priority[run]], ["tier", tierName(TIERS[told.flags[run] & 3])],
          ["now", [told.flags[run] & 8 ? "read by a request" : "idle", told.flags[run] & 4 ? "pinned" : ""].filter(Boolean).join(", ")],
          ["block ids", element("code", { textContent: tableWords(told.ids.subarray(2 * told.idsAt[run], 2 * told.idsAt[run + 1])) })]]));
    return;
  }
  const { name, pool, tier, id } = selected;
  const here = blocks().get(name);
  const words = describe(here.low[id], here.high[id], frame.now, frame.rest.tenants);
  const head = element("h3", { textContent: `Block ${id} on ${tierName(tier)}` });
  if (paused !== null) {
    const holders = frame.rest.sequences.filter(([serial]) => tablesOf(frame.rest, serial).some((pairs) => maskOf(pairs, here.high.length)[id]));
    target.replaceChildren(head, facts([["then", words], ["held by", holders.map((row) => row[1]).join(", ")]]));
    return;
  }
  asked = performance.now();
  const answer = await fetch(path("block", { pool, tier, id }), { headers: headers() });
  const told = await answer.json();
  if (selected?.kind !== "block" || selected.id !== id || selected.name !== name) return;
  if (!answer.ok) {
    target.replaceChildren(head, element("p", { className: "hint", textContent: told.error.message }));
    return;
  }
  const run = told.run;
  target.replaceChildren(head, facts([
    ["state", told.state], ["position", told.position === null ? "" : `tokens ${told.position}–${told.position + about.block_size - 1}`],
    ["held by", told.num_requests ? `${told.requests.join(", ")}${told.num_requests > told.requests.length ? " …" : ""}` : "nobody"],
    ["found by content", told.published ? "yes" : "no"],
    ...(run ? [["tenant", run.tenant || "none"], ["priority", run.priority], ["pinned", run.pinned ? "yes" : "no"], ["last used", `${run.idle_seconds} s ago`], ["its run", `${many(run.blocks, "block")} from block ${run.start} of the prompt, used again ${many(run.hits, "time")}`],
      ["above it", many(run.runs_above, "run")], ["hangs on it", `${many(run.runs_below, "run")} with ${many(run.blocks_below, "block")}`]] : []),
  ]));
}

function point(name, id, spoken = false) {
  const pool = blocks().get(name);
  const frame = shown();
  if (id < 0 || !pool || !frame) return;
  const words = `Block ${id}: ${describe(pool.low[id], pool.high[id], frame.now, frame.rest.tenants)}`;
  grids.get(name).grid.canvas.title = words;
  if (spoken) find("announce").textContent = words;
}

const tree = new Tree(find("tree-canvas"), colours, {
  move: (run, spoken) => {
    const told = shown()?.rest.tree;
    const words = run >= 0 && told ? `${many(told.blocks[run], "block")} from token ${told.start[run] * about.block_size}, tenant ${shown().rest.tenants[told.tenant[run]] || "none"}, used again ${many(told.hits[run], "time")}, ${many(told.children[run].length, "continuation")}` : "\u00a0";
    find("tree-hint").textContent = words;
    if (spoken) find("announce").textContent = words;
  },
  choose: (run) => {
    const told = shown().rest.tree;
    select({ kind: "run", number: told.number[run], start: told.start[run] });
  },
});
const charts = new Charts(find("chart-list"), colours);
const chat = new Chat(find("chat"), () => about.model);

// --- time ----------------------------------------------------------------------------------------------------------------

function goTo(number) {
  const last = store.frames.length - 1;
  if (last < 0) return;
  paused = number === null ? null : Math.max(0, Math.min(last, number));
  shownBlocks = paused === null ? null : store.blocksAt(paused);
  find("pause").textContent = paused === null ? "Pause" : "Go on";
  find("pause").setAttribute("aria-pressed", String(paused !== null));
  document.body.classList.toggle("paused", paused !== null);
  if (selected?.kind === "block") drawDetails();
  listsDrawn = chartsDrawn = 0;
  soon();
}

function drawTime() {
  const slider = find("when"), last = store.frames.length - 1;
  slider.max = String(last);
  slider.value = String(place());
  const back = (store.frames[last].time - shown().time) / 1000;
  const kept = (store.frames[last].time - store.frames[0].time) / 1000;
  find("when-text").textContent = paused === null ? `live, ${kept.toFixed(0)} s kept` : `${back.toFixed(1)} s ago`;
  slider.setAttribute("aria-valuetext", find("when-text").textContent);
}

find("pause").addEventListener("click", () => goTo(paused === null ? store.frames.length - 1 : null));
find("back").addEventListener("click", () => goTo(place() - 1));
find("forward").addEventListener("click", () => goTo(place() + 1));
find("when").addEventListener("input", (event) => goTo(Number(event.target.value)));
find("clear").addEventListener("click", () => select(null));
colours.mode = document.querySelector("input[name=mode]:checked").value; // a browser may keep it over a reload
for (const input of document.querySelectorAll("input[name=mode]"))
  input.addEventListener("change", () => {
    colours.mode = input.value;
    listsDrawn = chartsDrawn = 0;
    soon();
  });
document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, button, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = { " ": () => find("pause").click(), ",": () => goTo(place() - 1), ".": () => goTo(place() + 1), Escape: () => select(null) }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
new ResizeObserver(() => {
  if (!grids.size) return;
  fit();
  listsDrawn = chartsDrawn = 0;
  soon();
}).observe(find("tiers"));
matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => {
  listsDrawn = chartsDrawn = 0;
  soon();
});

// --- the stream ----------------------------------------------------------------------------------------------------------

function hello(told) {
  about = told;
  find("title").textContent = told.title;
  document.title = `${told.title} · kvpool`;
  const models = told.models ?? [];
  find("model-choice").hidden = models.length < 2;
  find("model").replaceChildren(...models.map((name) => element("option", { value: name, textContent: name, selected: name === told.model })));
  find("from-device").textContent = tierName("GPU");
  chat.offer(Boolean(told.chat));
}

function frame(told) {
  if (paused !== null && told.after === null) goTo(null); // what was shown is gone
  const before = store.frames.length;
  let resized;
  try {
    resized = store.apply(told);
  } catch {
    start(about.model);
    return;
  }
  if (paused !== null && store.frames.length <= before) paused = Math.max(0, paused - (before + 1 - store.frames.length));
  if (resized.length) layOut();
  if (paused === null) soon();
  else drawTime();
}

function start(model) {
  following.abort();
  following = new AbortController();
  store = new Store();
  grids.clear();
  paused = shownBlocks = selected = null;
  const query = model ? `?${new URLSearchParams({ model })}` : "";
  follow(`/view/stream${query}`, { status, refused: askForKey, hello, frame, skipped: (told) => (skipped = told.messages) }, following.signal);
}

find("model").addEventListener("change", (event) => start(event.target.value));
start();

// For tests and measurements.
window.kvpool = { get store() { return store; }, tablesOf, grids, drawn, draw, goTo, get paused() { return paused; } };
