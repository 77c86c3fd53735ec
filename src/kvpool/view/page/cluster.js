// The page of a proxy: every node of a cluster, and why requests went where they went.

import { Charts, earlierOf, perSecond, rate, roundUp, short } from "/view/charts.js";
import { Colours } from "/view/colours.js";
import { element, fillTiles, keep, many } from "/view/panels.js";
import { askForKey, follow, status } from "/view/stream.js";

const KEPT = 360; // looks: three minutes
const RECENT = 100; // tenths of a second
const MEDIA = ["gpu", "cpu", "storage"];
const CHARTS = [
  ["Hit rate", "%", [["hit rate", "cached", rate]], false, 100],
  ["Decisions a second", "", [["decisions", "used", (frame, earlier) => perSecond(frame, earlier, (counts) => counts.routes)]], false, 1],
  ["Requests in flight", "", [["in flight", "shared", (frame) => frame.rest.requests]], false, 1],
  ["Blocks in the index", "", [["blocks", "cached", (frame) => frame.rest.blocks]], false, 1],
];
const find = (id) => document.getElementById(id);

const frames = [];
const charts = new Charts(find("chart-list"), new Colours(), CHARTS);
let look = null;
let chosen = null; // the node whose decisions are shown alone

const shortName = (url) => url.replace(/^https?:\/\//, "");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(0)} %` : "–");

function take(told) {
  look = told;
  const nodes = Object.values(told.nodes), router = told.router;
  frames.push({
    now: told.now * 10, // charts count tenths of a second
    rest: {
      counts: { "hit_tokens.any": router.num_hit_tokens, prompt_tokens: router.num_prompt_tokens, routes: router.num_routes },
      requests: sum(nodes.map((node) => node.num_requests)), blocks: told.index.num_blocks,
    },
  });
  if (frames.length > KEPT) frames.shift();
  show();
}

function show() {
  if (!look) return;
  showTiles();
  showNodes();
  showDecisions();
  charts.show(frames, frames.length - 1);
}

function showTiles() {
  const last = frames.at(-1), earlier = earlierOf(frames, frames.length - 1, RECENT);
  const nodes = Object.values(look.nodes), router = look.router;
  const ready = nodes.filter((node) => node.is_ready).length;
  const recent = rate(last, earlier);
  const events = nodes.map((node) => node.events).filter(Boolean);
  const total = (field) => sum(nodes.map((node) => node[field]));
  fillTiles(find("tiles"), [
    [`${ready} of ${nodes.length}`, "nodes ready", nodes.length === ready ? "" : `${nodes.length - ready} not`],
    [recent === undefined ? "–" : `${recent.toFixed(0)} %`, "of prompts found cached", `${share(router.num_hit_tokens, router.num_prompt_tokens)} since the start`],
    [short(perSecond(last, earlier, (counts) => counts.routes)), "decisions a second", `${short(router.num_routes)} so far`],
    [short(total("num_requests")), "requests in flight", `${short(total("num_waiting_tokens"))} tokens to compute`],
    [short(look.index.num_blocks), "different blocks", `${short(look.index.num_bytes / 1e6)} MB of index`],
    [short(sum(events.map((one) => one.num_lost))), "messages lost", `${many(sum(events.map((one) => one.num_gaps)), "gap")}, ${many(sum(events.map((one) => one.num_restarts)), "restart")}`],
  ]);
}

function bar(parts, widths) {
  parts.forEach((part, place) => (part.style.width = `${widths[place]}%`));
}

const stripe = (...kinds) => element("span", { className: "bar" }, ...kinds.map((kind) => element("i", { className: `m-${kind}` })));

function showNodes() {
  const rows = Object.entries(look.nodes).map(([url, node]) => ({ ...node, key: url }));
  const most = roundUp(Math.max(10, ...rows.map((node) => sum(MEDIA.map((medium) => node.blocks[medium])))));
  find("nodes-count").textContent = `a full bar is ${many(most, "block")} · ${many(sum(rows.map((node) => sum(Object.values(node.blocks)))), "block")} on ${many(rows.length, "node")}`;
  keep(find("node-list"), rows, (node) => {
    const button = element("button", { type: "button", title: node.key },
      element("span", { className: "name", textContent: shortName(node.key) }), element("span"),
      stripe(...MEDIA), element("span", { className: "told" }), element("span", { className: "told" }));
    button.addEventListener("click", () => choose(node.key));
    return element("li", {}, button);
  }, (row, node) => {
    const button = row.firstChild, [, badge, blocks, held, doing] = button.children;
    button.setAttribute("aria-pressed", String(chosen === node.key));
    button.className = node.is_ready ? "" : "gone";
    badge.className = `badge ${node.state}`;
    badge.textContent = node.state;
    bar([...blocks.children], MEDIA.map((medium) => (100 * node.blocks[medium]) / most));
    const { gpu, cpu, storage } = node.blocks;
    held.textContent = `${short(gpu)} GPU · ${short(cpu)} host · ${short(storage)} storage${node.events ? "" : " · no events"}`;
    doing.textContent = `${share(node.num_hit_tokens, node.num_prompt_tokens)} hits · ${node.num_requests} in flight · ${short(node.num_waiting_tokens)} to compute`;
  });
}

function showDecisions() {
  const rows = look.decisions.filter((one) => chosen === null || one.node === chosen).map((one) => ({ ...one, key: String(one.number) }));
  const longest = Math.max(1, ...rows.map((one) => one.num_tokens));
  find("decisions-count").textContent = rows.length ? `the last ${rows.length}${chosen ? ` to ${shortName(chosen)}` : ""}` : "none yet";
  find("clear").hidden = chosen === null;
  keep(find("decision-list"), rows, (one) => element("li", {},
    element("span", { className: "name", textContent: shortName(one.node), title: one.node }),
    element("span", { className: "told", textContent: `${short(Math.min(one.hit.storage, one.num_tokens))} of ${short(one.num_tokens)} cached` }),
    element("span", { className: `badge ${one.reason}`, textContent: one.reason }),
    stripe(...MEDIA, "new")),
  (row, one) => {
    const { gpu, cpu, storage } = one.hit, part = (tokens) => (100 * tokens) / longest;
    bar([...row.lastChild.children], [gpu, cpu - gpu, storage - cpu, one.num_tokens - storage].map(part));
  });
}

function choose(url) {
  chosen = chosen === url ? null : url;
  show();
}

find("clear").addEventListener("click", () => choose(chosen));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chosen !== null) choose(chosen);
});

follow("/view/stream", { status, refused: askForKey, look: take }, new AbortController().signal);

// For tests.
globalThis.kvpool = { frames, get look() { return look; }, get chosen() { return chosen; } };
