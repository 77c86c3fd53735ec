// The lists beside the grid: figures, requests, what is selected, events, and the flow between tiers.

import { earlierOf, generatedRate, perSecond, rate, short } from "/view/charts.js";
import { eachId } from "/view/store.js";

const MOST_ROWS = 80;
const MOST_EVENTS = 40;

export const plural = (count, word) => `${word}${count === 1 ? "" : "s"}`;
export const many = (count, word) => `${short(count)} ${plural(count, word)}`;

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function showTiles(list, frames, place) {
  const frame = frames[place], earlier = earlierOf(frames, place, 100);
  const counts = frame.rest.counts;
  const gpu = frame.rest.pools.filter((pool) => pool.tier === "GPU");
  const sum = (field) => gpu.reduce((total, pool) => total + pool[field], 0);
  const evicted = (all) => Object.keys(all).filter((name) => name.startsWith("evictions.")).reduce((total, name) => total + all[name], 0);
  const all = { rest: { counts: Object.fromEntries(Object.keys(counts).map((name) => [name, 0])) } };
  const recent = rate(frame, earlier), ever = rate(frame, all);
  const waiting = frame.rest.more.num_waiting;
  const prompts = short(perSecond(frame, earlier, (c) => c.prompt_tokens));
  const tiles = [
    [recent === undefined ? "–" : `${recent.toFixed(0)} %`, "of prompts from the cache", ever === undefined ? "" : `${ever.toFixed(0)} % since the start`],
    [`${((100 * sum("referenced")) / Math.max(sum("blocks"), 1)).toFixed(0)} %`, "of the blocks in use", `${short(sum("referenced"))} of ${short(sum("blocks"))}`],
    [short(sum("cached")), plural(sum("cached"), "cached block"), `${short(sum("pinned"))} pinned`],
    [short(frame.rest.numSequences), `${plural(frame.rest.numSequences, "request")} running`, waiting === undefined ? "" : `${short(waiting)} waiting`],
    frame.rest.more.generated === undefined
      ? [prompts, "prompt tokens a second", `${many(counts.requests, "request")} so far`]
      : [short(generatedRate(frame, earlier)), "tokens generated a second", `${prompts} prompt tokens a second`],
    [short(perSecond(frame, earlier, evicted)), "blocks evicted a second", `${short(evicted(counts))} so far`],
  ];
  fillTiles(list, tiles);
}

// Tiles of three texts each: a figure, what it counts, and what else there is to say.
export function fillTiles(list, tiles) {
  if (list.children.length !== tiles.length)
    list.replaceChildren(...tiles.map(() => element("div", { className: "tile" }, element("b"), element("span"), element("small"))));
  tiles.forEach((texts, number) => texts.forEach((text, part) => {
    const target = list.children[number].children[part];
    if (target.textContent !== text) target.textContent = text;
  }));
}

// Keeps a list of rows by key, so that focus and scroll stay where they are.
export function keep(list, wanted, make, fill) {
  const old = new Map([...list.children].map((row) => [row.dataset.key, row]));
  let before = null;
  for (const one of wanted) {
    let row = old.get(one.key);
    if (!row) {
      row = make(one);
      row.dataset.key = one.key;
    }
    old.delete(one.key);
    fill(row, one);
    const place = before ? before.nextSibling : list.firstChild;
    if (place !== row) list.insertBefore(row, place);
    before = row;
  }
  for (const row of old.values()) row.remove();
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function sized(bytes) {
  const power = Math.min(UNITS.length - 1, bytes < 1 ? 0 : Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}

// Tiers that find blocks by key: how full each is, and whose engines filled it.
export function showKeyedTiers(card, list, tiers, colours) {
  card.hidden = !tiers.length;
  keep(list, tiers.map((tier) => ({ key: tier.name, ...tier })),
    () => element("li", {}, element("b"), element("span", { className: "room" }), element("div", { className: "bar" }), element("ul", { className: "keys" })),
    (row, tier) => {
      const [name, room, bar, keys] = row.children;
      const holders = [...tier.holders, ...(tier.others ? [["others", tier.others]] : [])];
      const looked = tier.hits + tier.misses;
      name.textContent = tier.name;
      room.textContent = tier.problem || [
        tier.used === null ? "" : `${sized(tier.used)}${tier.capacity === null ? "" : ` of ${sized(tier.capacity)}`}`,
        tier.values === null ? "" : many(tier.values, "value"),
        looked ? `${((100 * tier.hits) / looked).toFixed(0)} % of ${many(looked, "load")} here` : "",
        tier.stored ? `${short(tier.stored)} stored by this engine` : "",
      ].filter(Boolean).join(", ");
      row.classList.toggle("down", Boolean(tier.problem));
      const parts = holders.length || tier.used === null ? holders : [["", tier.used]];
      bar.hidden = tier.capacity === null;
      bar.replaceChildren(...parts.map(([who, bytes], number) => {
        const part = element("i", { title: who ? `${who}: ${sized(bytes)}` : sized(bytes) });
        part.style.width = `${(100 * bytes) / Math.max(tier.capacity ?? 1, 1)}%`;
        part.style.background = colours.tenant(number);
        return part;
      }));
      keys.replaceChildren(...holders.map(([who, bytes], number) => {
        const swatch = element("i", { className: "swatch" });
        swatch.style.background = colours.tenant(number);
        return element("li", {}, swatch, `${who} ${sized(bytes)}`);
      }));
    });
}

// Sessions: where the tokens of each lie, what it must compute again when it goes on, and what its end would give up.
export function showSessions(card, list, sessions) {
  card.hidden = !sessions.length;
  const longest = Math.max(1, ...sessions.map((one) => one.here + one.below + one.missing));
  keep(list, sessions.map((one) => ({ key: `${one.tenant}/${one.name}`, ...one })),
    () => element("li", {}, element("span", { className: "name" }), element("span", { className: "badge" }), element("span", { className: "room" }),
      element("span", { className: "bar" }, element("i", { className: "b-cached" }), element("i", { className: "b-below" }), element("i", { className: "b-ahead" }))),
    (row, one) => {
      const [name, badge, room, bar] = row.children;
      name.textContent = one.tenant ? `${one.tenant}: ${one.name}` : one.name;
      badge.textContent = one.state === "paused" && one.returns !== null ? `back in ${Math.round(one.returns)} s` : one.state;
      room.textContent = [
        `${short(one.here)} here`, one.below ? `${short(one.below)} to load` : "", one.missing ? `${short(one.missing)} to compute` : "",
        `${short(one.own)} its own`,
      ].filter(Boolean).join(", ");
      [one.here, one.below, one.missing].forEach((tokens, place) => { bar.children[place].style.width = `${(100 * tokens) / longest}%`; });
    });
}

// Tokens and names of causes, the most first.
export const missedOf = (missed) => Object.entries(missed).sort((one, other) => other[1] - one[1]).map(([cause, tokens]) => [tokens, causeName(cause)]);
const causeName = (cause) => cause.replaceAll("_", " ");

// What the prompts of the last hour missed, by cause: tokens, their share of all prompts, and what helps.
export function showMissed(card, list, count, told) {
  card.hidden = !told;
  if (!told) return;
  const share = (tokens) => `${((100 * tokens) / Math.max(told.prompt, 1)).toFixed(1)} %`;
  count.textContent = `${share(told.cached)} of ${many(told.prompt, "prompt token")} came from the cache`;
  keep(list, told.missed.map(([cause, tokens, words]) => ({ key: cause, cause, tokens, words })),
    ({ cause }) => element("li", {}, element("b", { textContent: causeName(cause) }), element("span", { className: "room" }),
      element("div", { className: "bar" }, element("i", { className: `cause-${cause}` })), element("span", { className: "help" })),
    (row, { tokens, words }) => {
      const [, room, bar, help] = row.children;
      room.textContent = `${many(tokens, "token")}, ${share(tokens)} of prompts`;
      bar.firstChild.style.width = share(tokens).replace(" ", "");
      if (help.textContent !== words) help.textContent = words;
    });
}

// The parts of a request's bar: from the cache, computed by the cause for which it missed, generated, and places ahead.
function partsOf(one) {
  const cached = Math.min(one.cached, one.written), computed = Math.max(0, Math.min(one.written, one.prompt) - cached);
  const causes = Object.entries(one.missed), total = causes.reduce((sum, [, tokens]) => sum + tokens, 0);
  const missed = causes.map(([cause, tokens]) => [`cause-${cause}`, (computed * tokens) / total]);
  return [["b-cached", cached], ...missed, ["b-new", one.written - cached - (total ? computed : 0)], ["b-ahead", Math.max(0, one.reserved - one.written)]];
}

export function showRequests(list, count, rest, colours, chosen, choose) {
  const waiting = rest.more.waiting ?? [];
  const longest = Math.max(1, ...rest.sequences.map((row) => row[7]), ...waiting.map((row) => row[2]));
  const rows = [
    ...rest.sequences.map(([serial, name, tenant, swapped, prompt, cached, written, reserved, missed]) => ({
      key: `s${serial}`, serial, name, tenant: rest.tenants[tenant], colour: colours.tenant(tenant), prompt, cached, written, reserved, missed,
      state: swapped ? "swapped" : written < prompt ? "prefill" : "decode",
    })),
    ...waiting.map(([name, tenant, prompt, seconds], place) => ({
      key: `w${name}/${place}`, name, tenant, colour: colours.tenant(Math.max(0, rest.tenants.indexOf(tenant))), prompt, cached: 0,
      written: 0, reserved: prompt, missed: {}, state: "waiting", seconds,
    })),
  ];
  const more = rest.more.num_waiting === undefined ? "" : `, ${rest.more.num_waiting} waiting`;
  count.textContent = `${rest.numSequences} live${more}${rows.length > MOST_ROWS ? `; ${MOST_ROWS} shown` : ""}`;
  const part = (tokens) => `${(100 * tokens) / longest}%`;
  keep(list, rows.slice(0, MOST_ROWS), () => {
    const button = element("button", { type: "button" },
      element("i", { className: "swatch" }), element("span", { className: "name" }), element("span", { className: "badge" }),
      element("span", { className: "tokens" }),
      element("span", { className: "bar" }));
    button.addEventListener("click", () => choose(button.parentNode.request));
    return element("li", {}, button);
  }, (row, one) => {
    row.request = one;
    const look = [one.name, one.colour, one.state, one.prompt, one.written, one.cached, one.reserved, one.seconds, longest, chosen === one.serial, JSON.stringify(one.missed)].join();
    if (row.look === look) return; // most of them, most of the time
    row.look = look;
    const [swatch, name, badge, tokens, bar] = row.firstChild.children;
    row.firstChild.setAttribute("aria-pressed", String(chosen !== null && chosen === one.serial));
    row.firstChild.disabled = one.serial === undefined;
    swatch.style.background = one.colour;
    name.textContent = one.name;
    badge.textContent = one.state;
    badge.className = `badge ${one.state}`;
    tokens.textContent = one.state === "waiting" ? `${many(one.prompt, "token")}, ${one.seconds} s` : `${many(one.written, "token")}, ${[[one.cached, "cached"], ...missedOf(one.missed)].map(([tokens, words]) => `${short(tokens)} ${words}`).join(", ")}`;
    bar.replaceChildren(...partsOf(one).map(([className, tokens]) => {
      const made = element("i", { className });
      made.style.width = part(tokens);
      return made;
    }));
  });
}

export function showEvents(list, count, events, total, tierName) {
  count.textContent = total ? `${short(total)} so far` : "none yet";
  const words = (event) => {
    const blocks = event.blocks === undefined ? "" : many(event.blocks, "block");
    if (event.kind === "stored") return `${blocks} on ${tierName(event.tier)}${event.tenant ? ` for ${event.tenant}` : ""}`;
    if (event.kind === "removed") return `${blocks} from ${tierName(event.tier)}, ${event.reason}`;
    if (event.tiers) return `${blocks} ${tierName(event.tiers[0])} → ${tierName(event.tiers[1])}`;
    if (event.priorities) return `${blocks} priority ${event.priorities[0]} → ${event.priorities[1]}`;
    return "pools were made or resized";
  };
  keep(list, events.slice(0, MOST_EVENTS).map((event) => ({ ...event, key: String(event.id) })),
    (event) => element("li", {},
      element("span", { className: `badge ${event.kind}`, textContent: event.kind }), element("span", { textContent: words(event) }),
      element("code", { textContent: event.digest ?? "" })),
    () => {});
}

// A list of facts: [[term, description], ...].
export function facts(pairs) {
  return element("dl", {}, ...pairs.filter(([, text]) => text !== undefined && text !== "").flatMap(([term, text]) => [
    element("dt", { textContent: term }), element("dd", {}, text instanceof Node ? text : String(text)),
  ]));
}

// A block table, or the blocks of a run, in words: 0–3 → 17–20.
export function tableWords(pairs) {
  const parts = [];
  let column = 0;
  for (let place = 0; place < pairs.length && parts.length < 60; place += 2) {
    const [first, many] = [pairs[place], pairs[place + 1]];
    const span = (from) => (many > 1 ? `${from}–${from + many - 1}` : `${from}`);
    parts.push(first < 0 ? `${span(column)} → none` : `${span(column)} → ${span(first)}`);
    column += many;
  }
  return parts.join("   ");
}

export function maskOf(pairs, size) {
  const mask = new Uint8Array(size);
  eachId(pairs, (id) => (mask[id] = 1));
  return mask;
}

export function showFlow(flow, frames, place) {
  const frame = frames[place], earlier = earlierOf(frames, place);
  const down = perSecond(frame, earlier, (counts) => counts.offloaded_blocks + counts.swapped_blocks);
  const up = perSecond(frame, earlier, (counts) => counts.onboarded_blocks);
  for (const [name, value] of [["down", down], ["up", up]]) {
    const line = flow.querySelector(`.${name}`);
    line.querySelector("b").textContent = short(value);
    line.classList.toggle("moving", value > 0);
    line.style.setProperty("--strength", String(Math.min(1, Math.log10(1 + (value || 0)) / 3)));
  }
}
