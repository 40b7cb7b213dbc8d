// View 5: rates and times over the window, each from sums over its share of it.
import { Surface, hideTip, niceStep, showTip, timeAxis } from "./canvas.js";
import { count, moment, seconds } from "./format.js";
import { indexAbove, quantile } from "./store.js";

const LEFT = 58, FOOT = 20, HEADER = 6;
const MAX_SAMPLED = 64; // steps of one bin of the window from which a percentile is taken
const number = (value) => count(value), time = (value) => seconds(value), share = (value) => (Number.isFinite(value) ? `${value.toFixed(0)} %` : "–");

/** Each plot: its canvas, unit, series [name, colour, value of a bin (store, from, to, t0, t1)]. */
const PLOTS = [
  ["plot-tokens", number, [
    ["prefill", "prefill", (s, a, b, t0, t1) => s.sum("prefill", a, b) / (t1 - t0)],
    ["decode", "decode", (s, a, b, t0, t1) => s.sum("decode", a, b) / (t1 - t0)],
    ["given out", "fg", (s, a, b, t0, t1) => s.sum("out", a, b) / (t1 - t0)]]],
  ["plot-load", number, [["running", "forward", (s, a, b) => gauge(s, "run", b)], ["waiting", "decode", (s, a, b) => gauge(s, "wait", b)],
    ["swapped", "swap", (s, a, b) => gauge(s, "swapped", b)]]],
  ["plot-pool", share, [["KV in use", "forward", (s, a, b) => (100 * gauge(s, "used", b)) / blocks(s)],
    ["with cached", "cached", (s, a, b) => (100 * (gauge(s, "used", b) + gauge(s, "cachedBlocks", b))) / blocks(s)],
    ["prefix hits", "accent", (s, a, b) => (100 * s.sum("cachedTokens", a, b)) / (s.sum("promptTokens", a, b) || NaN)]]],
  ["plot-steps", time, [["p50", "forward", (s, a, b) => stepQuantile(s, a, b, 0.5)], ["p95", "decode", (s, a, b) => stepQuantile(s, a, b, 0.95)]]],
  ["plot-ttft", time, [["p50", "forward", (s, a, b, t0, t1) => sampleQuantile(s.ttft, t0, t1, 0.5)],
    ["p95", "decode", (s, a, b, t0, t1) => sampleQuantile(s.ttft, t0, t1, 0.95)]]],
  ["plot-tpot", time, [["p50", "forward", (s, a, b, t0, t1) => sampleQuantile(s.tpot, t0, t1, 0.5)],
    ["p95", "decode", (s, a, b, t0, t1) => sampleQuantile(s.tpot, t0, t1, 0.95)]]],
];

function gauge(store, name, to) { return to > 0 ? store.steps[name][to - 1] : NaN; }
function blocks(store) { return (store.head?.limits.num_blocks || [1]).reduce((a, b) => a + b, 0) || 1; }

function stepQuantile(store, from, to, q) {
  const stride = Math.max(1, Math.ceil((to - from) / MAX_SAMPLED)), values = [];
  for (let i = from; i < to; i += stride) values.push(store.steps.s[i]);
  return quantile(Float64Array.from(values), q);
}

/** Return a quantile of the samples in a span of time; NaN without samples. */
export function sampleQuantile(columns, from, to, q) {
  const a = indexAbove(columns.t, from, columns.count), b = indexAbove(columns.t, to, columns.count);
  return quantile(columns.value.slice(a, b), q);
}

export class Plots {
  constructor(app) {
    this.app = app;
    this.pointed = null; // a share of the width, while the pointer is over any plot
    this.plots = PLOTS.map(([id, format, series]) => ({ surface: new Surface(document.getElementById(id), () => app.draw()), format, series }));
  }

  draw(view, palette) {
    const pointed = this.plots.find((plot) => plot.surface.pointer);
    this.pointed = pointed ? (pointed.surface.pointer.x - LEFT) / (pointed.surface.width - LEFT - 6) : null;
    for (const plot of this.plots) this.#plot(plot, view, palette, plot === pointed);
  }

  #plot({ surface, format, series }, view, palette, isPointed) {
    const { context } = surface, store = this.app.store, width = surface.width - LEFT - 6, bottom = surface.height - FOOT;
    if (width <= 0) return;
    const num = Math.max(10, Math.min(150, Math.floor(width / 4))), span = (view.to - view.from) / num, values = series.map(() => new Float64Array(num));
    let most = 0, from = store.stepAt(view.from);
    for (let bin = 0; bin < num; bin++) {
      const t0 = view.from + bin * span, to = store.stepAt(t0 + span);
      series.forEach(([, , value], i) => {
        const found = t0 + span < store.begin || t0 > store.end ? NaN : value(store, from, to, t0, t0 + span);
        values[i][bin] = found;
        if (found > most) most = found;
      });
      from = to;
    }
    const isShare = format === share, step = isShare ? 50 : niceStep(most || 1, 3), top = isShare ? 100 : step * Math.ceil((most * 1.04 || 1) / step), y = (value) => bottom - (value / top) * (bottom - HEADER);
    surface.clear(palette);
    timeAxis(surface, palette, { left: LEFT, width, top: HEADER, bottom }, view);
    context.textAlign = "right";
    context.fillStyle = palette["fg-2"];
    context.strokeStyle = palette.grid;
    for (let value = 0; value <= top * 1.001; value += step) {
      context.fillText(format(value), LEFT - 6, Math.max(8, y(value)));
      context.beginPath(); context.moveTo(LEFT, y(value) + 0.5); context.lineTo(LEFT + width, y(value) + 0.5); context.stroke();
    }
    series.forEach(([, colour], i) => line(context, values[i], palette[colour], LEFT, width, y));
    if (this.pointed !== null && this.pointed >= 0 && this.pointed <= 1) {
      context.fillStyle = palette.accent;
      context.fillRect(LEFT + this.pointed * width, HEADER, 1, bottom - HEADER);
      const bin = Math.min(num - 1, Math.floor(this.pointed * num));
      if (isPointed) showTip(surface, moment(view.from + bin * span, view.began, view.zero), series.map(([name, colour], i) => [name, format(values[i][bin]), palette[colour]]));
    } else if (isPointed) hideTip();
  }
}

/** Draw a line through values; NaN is left out, and isolated values get a dot. */
function line(context, values, colour, left, width, y) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 1.6;
  context.beginPath();
  let last = -1;
  const x = (bin) => left + ((bin + 0.5) / values.length) * width;
  for (let bin = 0; bin < values.length; bin++) {
    if (Number.isNaN(values[bin])) continue;
    if (last >= 0 && bin - last < 12) context.lineTo(x(bin), y(values[bin]));
    else { context.moveTo(x(bin), y(values[bin])); context.rect(x(bin) - 1, y(values[bin]) - 1, 2, 2); context.moveTo(x(bin), y(values[bin])); }
    last = bin;
  }
  context.stroke();
  context.lineWidth = 1;
}
