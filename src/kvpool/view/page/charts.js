// Lines over the last minutes, from the frames that are kept.

const WINDOW = 50; // frames over which a rate is taken: five seconds at ten a second
const hits = (counts) => Object.keys(counts).filter((name) => name.startsWith("hit_tokens.")).reduce((sum, name) => sum + counts[name], 0);

// [title, unit, [[name, colour, value(frame, earlier)]], stacked, what the top of the axis is at least]
const CHARTS = [
  ["Hit rate", "%", [["hit rate", "cached", (frame, earlier) => rate(frame, earlier)]], false, 100],
  ["GPU blocks", "", [
    ["in use", "used", (frame) => gpu(frame, "referenced")],
    ["cached", "cached", (frame) => gpu(frame, "cached")],
  ], true, 0],
  ["Prompt tokens a second", "", [
    ["from the cache", "cached", (frame, earlier) => perSecond(frame, earlier, hits)],
    ["computed", "used", (frame, earlier) => perSecond(frame, earlier, (counts) => counts.prompt_tokens - hits(counts))],
  ], true, 0],
  ["Time to first token", "ms", [
    ["p50", "cached", (frame) => frame.rest.more.latency?.first_token_ms?.[0]],
    ["p99", "pinned", (frame) => frame.rest.more.latency?.first_token_ms?.[1]],
  ], false, 0],
  ["Between tokens", "ms", [
    ["p50", "cached", (frame) => frame.rest.more.latency?.between_tokens_ms?.[0]],
    ["p99", "pinned", (frame) => frame.rest.more.latency?.between_tokens_ms?.[1]],
  ], false, 0],
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

export const earlierOf = (frames, place) => frames[Math.max(0, place - WINDOW)];

export class Charts {
  constructor(list, colours, charts = CHARTS) {
    this.colours = colours;
    this.charts = charts.map(([title, unit, lines, stacked, top]) => {
      const figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      const canvas = document.createElement("canvas");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", title);
      figure.append(caption, canvas);
      list.append(figure);
      const chart = { title, unit, lines, stacked, top, figure, caption, canvas, width: 0, height: 0 };
      new ResizeObserver(() => Object.assign(chart, { width: canvas.clientWidth, height: canvas.clientHeight })).observe(canvas);
      return chart;
    });
  }

  // Draws all charts; `place` is the frame that is shown.
  show(frames, place) {
    if (frames.length < 2) return;
    const step = Math.max(1, Math.floor(frames.length / 240));
    const places = [];
    for (let at = 0; at < frames.length; at += step) places.push(at);
    for (const chart of this.charts) {
      const values = chart.lines.map(([, , value]) => places.map((at) => value(frames[at], earlierOf(frames, at))));
      const last = chart.lines.map(([, , value]) => value(frames[place], earlierOf(frames, place)));
      const known = values.some((line) => line.some((value) => value !== undefined));
      chart.figure.hidden = !known;
      if (known) this.#draw(chart, values, last, place / (frames.length - 1));
    }
  }

  #draw({ title, unit, lines, stacked, top, caption, canvas, width, height }, values, last, at) {
    const scale = devicePixelRatio || 1;
    const wide = Math.round(width * scale), high = Math.round(height * scale);
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.lineWidth = 1;
    const sums = values[0].map((_, place) => values.reduce((sum, line) => sum + (line[place] ?? 0), 0));
    const most = Math.max(top, ...(stacked ? sums : values.flat().map((value) => value ?? 0)), 1e-9) * (top === 100 ? 1 : 1.08);
    const x = (place) => (place / Math.max(values[0].length - 1, 1)) * width;
    const y = (value) => height - 1 - (value / most) * (height - 4);
    context.strokeStyle = this.colours.css.line;
    for (const share of [0.5, 1]) {
      context.beginPath();
      context.moveTo(0, y(most * share));
      context.lineTo(width, y(most * share));
      context.stroke();
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
    if (at < 1) {
      context.fillStyle = this.colours.css.text;
      context.fillRect(at * width - 0.5, 0, 1, height);
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
    canvas.setAttribute("aria-label", `${title}: ${words.map((word) => word.textContent).join(", ")}`);
  }
}

export function short(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
