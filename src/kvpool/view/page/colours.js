// What the colours mean: a table from what is known of a block to a pixel, for each way of colouring.

import { CACHED, FREE, PINNED, REFERENCED, holdersOf, priorityOf, stateOf, tenantOf } from "/view/store.js";

const AGES = [[10, "1 s"], [100, "10 s"], [600, "1 min"], [6000, "10 min"], [Infinity, "older"]]; // in tenths of a second

function ageOf(tenths) {
  let place = 0;
  while (tenths >= AGES[place][0]) place++;
  return place;
}

export class Colours {
  constructor() {
    this.mode = "state";
    this.read();
    matchMedia("(prefers-color-scheme: light)").addEventListener("change", () => this.read());
  }

  // Reads the colours of the style sheet, which knows dark from light.
  read() {
    const style = getComputedStyle(document.documentElement);
    const css = (name) => style.getPropertyValue(name).trim();
    this.css = Object.fromEntries(
      ["free", "used", "shared", "cached", "pinned", "card", "text", "muted", "line", "accent", "amber"].map((name) => [name, css(`--${name}`)]),
    );
    this.tenants = Array.from({ length: 10 }, (_, number) => css(`--tenant-${number}`));
    this.ages = ["age-0", "age-1", "age-2", "age-3", "age-4"].map((name) => css(`--${name}`));
    this.priorities = ["priority-0", "priority-1", "priority-2", "priority-3", "priority-4"].map((name) => css(`--${name}`));
    const card = rgb(this.css.card);
    this.pixels = {
      state: [this.css.free, this.css.used, this.css.shared, this.css.cached, this.css.pinned].map(rgb),
      tenants: this.tenants.map(rgb), ages: this.ages.map(rgb), priorities: this.priorities.map(rgb), card,
    };
  }

  tenant(number) {
    return this.tenants[number % this.tenants.length];
  }

  // The colour of one block, as [red, green, blue].
  #block(low, high, now) {
    const state = stateOf(high), pixels = this.pixels;
    if (state === FREE) return pixels.state[0];
    if (this.mode === "state") {
      if (state === REFERENCED) return pixels.state[holdersOf(high) > 1 ? 2 : 1];
      return pixels.state[state === PINNED ? 4 : 3];
    }
    if (this.mode === "tenant") {
      const colour = pixels.tenants[tenantOf(high) % pixels.tenants.length];
      return state === REFERENCED ? colour : mix(colour, pixels.card, 0.45);
    }
    if (this.mode === "age") {
      if (state === REFERENCED) return pixels.state[1];
      return pixels.ages[ageOf(now - low)];
    }
    return pixels.priorities[Math.min(4, Math.floor(priorityOf(high) / 20))];
  }

  // Fills `out` (a pixel a block) with the first `count` blocks of a pool; blocks outside of `chosen`, if given, fade.
  paint(pool, out, now, chosen, count) {
    const { low, high, heat } = pool;
    const card = this.pixels.card;
    const known = new Map();
    const age = this.mode === "age";
    let lastKey = -1, last = 0;
    for (let block = 0; block < count; block++) {
      const word = high[block];
      const faded = chosen !== null && !chosen[block];
      const bright = heat[block];
      let key = (word >>> 0) * 8 + (bright << 1) + (faded ? 1 : 0);
      if (age && stateOf(word) >= CACHED) key = -2 - ageOf(now - low[block]) * 8 - (bright << 1) - (faded ? 1 : 0);
      if (key !== lastKey) {
        lastKey = key;
        last = known.get(key);
        if (last === undefined) {
          let colour = this.#block(low[block], word, now);
          if (bright && stateOf(word) !== FREE) colour = mix(colour, [255, 255, 255], 0.16 * bright);
          if (faded) colour = mix(colour, card, 0.82);
          last = ((255 << 24) | (colour[2] << 16) | (colour[1] << 8) | colour[0]) >>> 0;
          known.set(key, last);
        }
      }
      out[block] = last;
    }
  }

  // [colour, words] for the legend.
  legend(tenants) {
    if (this.mode === "state")
      return [["free", "free"], ["used", "in use"], ["shared", "shared by requests"], ["cached", "cached"], ["pinned", "pinned"]].map(
        ([name, words]) => [this.css[name], words],
      );
    if (this.mode === "tenant")
      return [...tenants.slice(0, 8).map((name, number) => [this.tenant(number), name || "no tenant"])]
        .filter(([, words], number) => number > 0 || tenants.length === 1 || words !== "no tenant")
        .concat([[this.css.free, "free"]]);
    if (this.mode === "age")
      return [[this.css.used, "in use"], ...AGES.map(([, words], number) => [this.ages[number], number < 4 ? `< ${words}` : words])];
    return this.priorities.map((colour, number) => [colour, number < 4 ? `${20 * number}–${20 * number + 19}` : "80–100"]);
  }
}

export function describe(low, high, now, tenants) {
  const state = ["free", "in use", "cached", "pinned"][stateOf(high)];
  if (state === "free") return state;
  const words = [state, tenants[tenantOf(high)] ? `tenant ${tenants[tenantOf(high)]}` : "no tenant"];
  if (stateOf(high) === REFERENCED) words.push(`held by ${holdersOf(high)}${holdersOf(high) === 31 ? " or more" : ""}`);
  else words.push(`priority ${priorityOf(high)}`, `last used ${((now - low) / 10).toFixed(1)} s before`);
  return words.join(", ");
}

function rgb(text) {
  const hex = text.replace("#", "");
  return [0, 2, 4].map((place) => parseInt(hex.slice(place, place + 2), 16));
}

function mix(one, other, share) {
  return one.map((value, place) => Math.round(value * (1 - share) + other[place] * share));
}
