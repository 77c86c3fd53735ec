// Lines over the last minutes, from the frames that are kept.

const WINDOW = 50; // tenths of a second over which a rate is taken
const LEFT = 38, BELOW = 15; // pixels for the numbers of the axes
const hits = (counts) => Object.keys(counts).filter((name) => name.startsWith("hit_tokens.")).reduce((sum, name) => sum + counts[name], 0);
const hitsHere = (counts) => counts["hit_tokens.GPU"] ?? 0;
const generated = (frame) => frame.rest.more.generated;

// [title, unit, [[name, colour, value(frame, earlier)]], stacked, what the top of the axis is at least, whether it is known]
const CHARTS = [
  ["Hit rate", "%", [["hit rate", "cached", (frame, earlier) => rate(frame, earlier)]], false, 100],
  ["Blocks", "", [
    ["in use", "used", (frame) => gpu(frame, "referenced")],
    ["cached", "cached", (frame) => gpu(frame, "cached")],
  ], true, 1],
  ["Prompt tokens/s", "", [
    ["cached", "cached", (frame, earlier) => perSecond(frame, earlier, hitsHere)],
    ["tiers", "amber", (frame, earlier) => perSecond(frame, earlier, (counts) => hits(counts) - hitsHere(counts))],
    ["computed", "used", (frame, earlier) => perSecond(frame, earlier, (counts) => counts.prompt_tokens - hits(counts))],
  ], true, 1],
  ["Generated tokens/s", "", [["tokens", "shared", generatedRate]], false, 1, (frame) => generated(frame) !== undefined],
  ["Time to first token", "ms", [
    ["p50", "cached", (frame) => frame.rest.more.latency?.first_token_ms?.[0]],
    ["p99", "pinned", (frame) => frame.rest.more.latency?.first_token_ms?.[1]],
  ], false, 1, (frame) => frame.rest.more.latency],
  ["Between tokens", "ms", [
    ["p50", "cached", (frame) => frame.rest.more.latency?.between_tokens_ms?.[0]],
    ["p99", "pinned", (frame) => frame.rest.more.latency?.between_tokens_ms?.[1]],
  ], false, 1, (frame) => frame.rest.more.latency],
];

function gpu(frame, field) {
  return frame.rest.pools.filter((pool) => pool.tier === "GPU").reduce((sum, pool) => sum + pool[field], 0);
}

export function rate(frame, earlier) {
  const now = frame.rest.counts, before = earlier.rest.counts;
  const prompts = now.prompt_tokens - before.prompt_tokens;
  return prompts > 0 ? (100 * (hits(now) - hits(before))) / prompts : undefined;
}

export function perSecond(frame, earlier, count) {
  const seconds = (frame.now - earlier.now) / 10;
  return seconds > 0 ? (count(frame.rest.counts) - count(earlier.rest.counts)) / seconds : undefined;
}

export function generatedRate(frame, earlier) {
  const seconds = (frame.now - earlier.now) / 10;
  return seconds > 0 && generated(earlier) !== undefined ? (generated(frame) - generated(earlier)) / seconds : undefined;
}

// The newest frame that is at least so old, in tenths of a second; the first one if there is none.
export function earlierOf(frames, place, tenths = WINDOW) {
  let at = place;
  while (at > 0 && frames[place].now - frames[at].now < tenths) at--;
  return frames[at];
}

// The next of 1, 2, 5, 10, 20, 50, ...
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.9999) * power;
}

export class Charts {
  constructor(list, colours, charts = CHARTS) {
    this.colours = colours;
    this.charts = charts.map(([title, unit, lines, stacked, top, isKnown = () => true]) => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", title);
      figure.append(caption, canvas);
      list.append(figure);
      const chart = { title, unit, lines, stacked, top, isKnown, figure, caption, canvas, width: 0, height: 0 };
      new ResizeObserver(() => Object.assign(chart, { width: canvas.clientWidth, height: canvas.clientHeight })).observe(canvas);
      return chart;
    });
  }

  // Draws all charts; `place` is the frame that is shown.
  show(frames, place) {
    if (!frames.length) return;
    const step = Math.max(1, Math.floor(frames.length / 240));
    const places = [];
    for (let at = frames.length - 1; at >= 0; at -= step) places.unshift(at);
    const times = places.map((at) => frames[at].now - frames[places[0]].now);
    for (const chart of this.charts) {
      chart.figure.hidden = !chart.isKnown(frames[place]);
      if (chart.figure.hidden) continue;
      const values = chart.lines.map(([, , value]) => places.map((at) => value(frames[at], earlierOf(frames, at))));
      const last = chart.lines.map(([, , value]) => value(frames[place], earlierOf(frames, place)));
      this.#draw(chart, values, last, times, frames[place].now - frames[places[0]].now);
    }
  }

  #draw({ title, unit, lines, stacked, top, caption, canvas, width, height }, values, last, times, at) {
    const scale = devicePixelRatio || 1;
    const wide = Math.round(width * scale), high = Math.round(height * scale);
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.lineWidth = 1;
    const sums = values[0].map((_, place) => values.reduce((sum, line) => sum + (line[place] ?? 0), 0));
    const most = roundUp(Math.max(top, ...(stacked ? sums : values.flat().map((value) => value ?? 0))));
    const span = Math.max(times.at(-1), 10);
    const x = (place) => LEFT + (1 - (times.at(-1) - times[place]) / span) * (width - LEFT - 1);
    const y = (value) => height - BELOW - 1 - (value / most) * (height - BELOW - 8);
    this.#axes(context, width, height, most, span, y);
    if (!values.some((line) => line.some((value) => value !== undefined))) {
      context.textAlign = "center";
      context.fillText("nothing yet", LEFT + (width - LEFT) / 2, y(most / 2));
    }
    const below = new Array(values[0].length).fill(0);
    values.forEach((line, number) => {
      const colour = this.colours.css[lines[number][1]];
      context.beginPath();
      let pen = false;
      line.forEach((value, place) => {
        if (value === undefined) return;
        const high = y(stacked ? below[place] + value : value);
        if (pen) context.lineTo(x(place), high);
        else context.moveTo(x(place), high);
        pen = true;
      });
      context.strokeStyle = colour;
      context.lineWidth = 1.8;
      context.stroke();
      if (stacked) {
        for (let place = line.length - 1; place >= 0; place--) context.lineTo(x(place), y(below[place]));
        context.globalAlpha = 0.25;
        context.fillStyle = colour;
        context.fill();
        context.globalAlpha = 1;
        line.forEach((value, place) => (below[place] += value ?? 0));
      }
    });
    if (at < times.at(-1)) {
      context.fillStyle = this.colours.css.text;
      context.fillRect(LEFT + (1 - (times.at(-1) - at) / span) * (width - LEFT - 1) - 0.5, 0, 1, height - BELOW);
    }
    const words = lines.map(([name], number) => {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = this.colours.css[lines[number][1]];
      item.append(swatch, `${name} ${short(last[number])}${last[number] === undefined ? "" : unit && ` ${unit}`}`);
      return item;
    });
    const name = document.createElement("b");
    name.textContent = title;
    caption.replaceChildren(name, ...words);
    canvas.setAttribute("aria-label", `${title}: ${words.map((word) => word.textContent).join(", ")}; the axis ends at ${short(most)}`);
    canvas.dataset.top = short(most);
  }

  // Lines and numbers at 0, the middle and the top; below, how long ago the left end was.
  #axes(context, width, height, most, span, y) {
    context.strokeStyle = this.colours.css.line;
    context.fillStyle = this.colours.css.muted;
    context.font = "10.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      context.beginPath();
      context.moveTo(LEFT, y(most * share));
      context.lineTo(width, y(most * share));
      context.stroke();
      context.textAlign = "right";
      context.fillText(short(most * share), LEFT - 5, y(most * share));
    }
    context.textBaseline = "bottom";
    context.textAlign = "left";
    context.fillText(`${ago(span)} ago`, LEFT, height);
    context.textAlign = "right";
    context.fillText("now", width, height);
    context.textBaseline = "middle";
  }
}

function ago(tenths) {
  return tenths < 1200 ? `${Math.round(tenths / 10)} s` : `${(tenths / 600).toFixed(tenths % 600 ? 1 : 0)} min`;
}

export function short(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
