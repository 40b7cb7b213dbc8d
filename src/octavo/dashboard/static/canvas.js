// A canvas of its element's size, and the parts that all drawings share: axes, crosshair, hovering.
import { moment, seconds } from "./format.js";

/** A canvas in its element's size, sharp on any screen. `changed` is called when it must be redrawn. */
export class Surface {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.width = 0;
    this.height = 0;
    this.pointer = null; // {x, y} while the pointer is over it
    this.changed = changed;
    new ResizeObserver(() => { this.#fit(); changed(); }).observe(canvas);
    canvas.addEventListener("pointermove", (event) => { this.pointer = { x: event.offsetX, y: event.offsetY }; changed(); });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; hideTip(); changed(); });
    this.#fit();
  }

  #fit() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.max(1, Math.round(this.width * ratio));
    this.canvas.height = Math.max(1, Math.round(this.height * ratio));
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  clear(palette) {
    this.context.clearRect(0, 0, this.width, this.height);
    this.context.font = palette.font;
    this.context.textBaseline = "middle";
  }
}

/** Return a round distance for about `wanted` marks over a span: 1, 2 or 5 times a power of ten. */
export function niceStep(span, wanted) {
  const rough = span / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5]) if (rough <= factor * power) return factor * power;
  return 10 * power;
}

/** Draw marks of time below [left, right]; `from` and `to` are the times there. */
export function timeAxis(surface, palette, area, view) {
  const { context } = surface, step = niceStep(view.to - view.from, area.width / 95);
  context.fillStyle = palette["fg-2"];
  context.strokeStyle = palette.grid;
  context.textAlign = "center";
  context.beginPath();
  for (let k = Math.ceil((view.from - view.zero) / step); view.zero + k * step <= view.to; k++) {
    const time = view.zero + k * step, x = area.left + ((time - view.from) / (view.to - view.from)) * area.width;
    context.moveTo(Math.round(x) + 0.5, area.top);
    context.lineTo(Math.round(x) + 0.5, area.bottom);
    const label = step < 0.1 ? `+${seconds(time - view.zero)}` : moment(time, view.began, view.zero).slice(0, step < 1 ? undefined : view.began === null ? -3 : -4);
    if (x > area.left + 24 && x < area.left + area.width - 24) context.fillText(label, Math.round(x), area.bottom + 10);
  }
  context.stroke();
}

const tip = () => document.getElementById("tip");

/** Show numbers next to the pointer: rows of [name, value], under a title. */
export function showTip(surface, title, rows) {
  const box = tip(), place = surface.canvas.getBoundingClientRect();
  const dl = document.createElement("dl");
  for (const [name, value, colour] of rows) {
    const dt = document.createElement("dt");
    if (colour) { const dot = document.createElement("i"); dot.style.background = colour; dt.append(dot); }
    dt.append(name);
    const dd = document.createElement("dd");
    dd.textContent = value;
    dl.append(dt, dd);
  }
  const head = document.createElement("strong");
  head.textContent = title;
  box.replaceChildren(head, dl);
  box.hidden = false;
  const x = place.left + surface.pointer.x, y = place.top + surface.pointer.y;
  const left = x + 16 + box.offsetWidth > innerWidth ? x - 16 - box.offsetWidth : x + 16;
  const top = Math.min(y + 12, innerHeight - box.offsetHeight - 8);
  box.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

export function hideTip() { tip().hidden = true; }
