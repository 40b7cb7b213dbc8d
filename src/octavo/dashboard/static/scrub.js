// The bar below: the whole time, with the running and waiting requests, and the shown part.
import { Surface } from "./canvas.js";
import { moment } from "./format.js";

export class Scrub {
  constructor(app) {
    this.app = app;
    this.surface = new Surface(document.getElementById("scrub"), () => app.draw());
    const { canvas } = this.surface;
    const go = (event) => app.moveTo(this.#timeAt(event.offsetX));
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); go(event); });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) go(event); });
  }

  /** Return the time at a place of the bar. */
  #timeAt(x) {
    const { store } = this.app;
    return store.begin + (x / Math.max(1, this.surface.width)) * (store.end - store.begin);
  }

  draw(view, palette) {
    const { surface } = this, { context, width, height } = surface, { store } = this.app;
    surface.clear(palette);
    const { begin, end } = store;
    if (!(end > begin)) return;
    const all = end - begin, most = this.#most();
    for (const [name, colour] of [["wait", palette.decode], ["run", palette.forward]]) {
      context.fillStyle = colour;
      context.globalAlpha = 0.55;
      context.beginPath();
      context.moveTo(0, height);
      for (let px = 0; px <= width; px += 2) {
        const index = store.stepAt(begin + (px / width) * all) - 1;
        context.lineTo(px, height - (index < 0 ? 0 : store.steps[name][index] / most) * (height - 4));
      }
      context.lineTo(width, height);
      context.fill();
    }
    context.globalAlpha = 1;
    const left = Math.max(0, ((view.from - begin) / all) * width), right = Math.min(width, ((view.to - begin) / all) * width);
    context.fillStyle = palette.bg;
    context.globalAlpha = 0.5;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = palette.accent;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 0.75, Math.max(2, right - left - 1.5), height - 1.5);
    context.lineWidth = 1;
    this.#say(view, all);
  }

  #most() {
    const { store } = this.app, stride = Math.max(1, Math.floor(store.steps.count / 500));
    let most = 1;
    for (let i = 0; i < store.steps.count; i += stride) most = Math.max(most, store.steps.run[i], store.steps.wait[i]);
    return most;
  }

  /** Set the value in whole tenths: ten changes a second would be too many for a screen reader. */
  #say(view, all) {
    const { canvas } = this.surface, now = (view.to - view.zero).toFixed(1);
    if (canvas.getAttribute("aria-valuenow") === now) return;
    canvas.setAttribute("aria-valuemax", all.toFixed(1));
    canvas.setAttribute("aria-valuenow", now);
    canvas.setAttribute("aria-valuetext", moment(view.to, view.began, view.zero));
  }
}
