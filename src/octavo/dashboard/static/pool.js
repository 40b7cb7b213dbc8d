// View 2: the KV pool, a cell for each block (or for some): free, held (by which request), shared, cached; and the host tier.
import { Surface, hideTip, showTip } from "./canvas.js";
import { colourOf, count, element, hexPixel, percent, pixelOf, setText, shortName, syncChildren } from "./format.js";

const CELL_NAMES = ["free", "held by one", "shared", "cached"];
const MAX_OWNERS = 40; // in the table

/** Return the bytes of base64. */
function bytesOf(text) {
  const raw = atob(text || ""), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

/** Return a snapshot's cells and owners, decoded once. */
function decodeLook(look) {
  if (!look.decoded) {
    look.decoded = look.groups.map((group) => {
      const cells = bytesOf(group.cells), owner = bytesOf(group.owner);
      return { cells, owners: new Uint16Array(owner.buffer, 0, owner.length >> 1), per: group.per || 1, blocks: group.n };
    });
  }
  return look.decoded;
}

export class Pool {
  constructor(app) {
    this.app = app;
    this.surface = new Surface(document.getElementById("pool"), () => app.draw());
    this.legend = document.getElementById("pool-legend");
    this.owners = document.querySelector("#owners tbody");
    this.chosen = ""; // the request whose blocks are highlighted
    this.shown = null;
    this.places = [];
    this.small = document.createElement("canvas"); // a pixel a cell
    this.owners.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (!row) return;
      this.chosen = this.chosen === row.dataset.name ? "" : row.dataset.name;
      this.shown = null;
      app.draw();
      if (event.detail === 2) app.showRequest(row.dataset.name);
    });
  }

  draw(view, palette) {
    const store = this.app.store, look = store.lookAt(store.pools, view.to), { surface } = this;
    const key = look && `${look.t}|${this.chosen}|${surface.width}|${surface.height}|${palette.isDark}`;
    if (key !== this.shown) {
      surface.clear(palette);
      this.places = [];
      if (look) this.#map(look, palette); else this.#nothing(palette);
      this.shown = key;
    }
    if (surface.pointer && look) this.#hover(look, palette); else if (surface.pointer) hideTip();
  }

  #nothing(palette) {
    this.surface.context.fillStyle = palette["fg-2"];
    this.surface.context.textAlign = "center";
    this.surface.context.fillText("No look at the pool by this time.", this.surface.width / 2, 40);
    this.legend.replaceChildren();
    this.owners.replaceChildren();
  }

  #map(look, palette) {
    const { context, width, height } = this.surface, groups = decodeLook(look), names = this.app.store.holdersAt(look.t);
    const cells = groups.reduce((sum, group) => sum + group.cells.length, 0), room = Math.max(1, height - 30 * groups.length);
    const size = Math.max(3, Math.min(44, Math.floor(Math.sqrt((width * room) / Math.max(1, cells)))));
    const columns = Math.max(1, Math.floor(width / size)), held = new Map(), kinds = [0, 0, 0, 0];
    let top = 0;
    groups.forEach((group, number) => {
      if (groups.length > 1) {
        context.fillStyle = palette["fg-2"];
        context.textAlign = "left";
        context.fillText(`cache group ${number}`, 0, top + 10);
        top += 20;
      }
      this.#cells(group, names, { top, size, columns, held, kinds }, palette);
      this.places.push({ top, size, columns, group, names });
      top += Math.ceil(group.cells.length / columns) * size + 8;
    });
    this.#legend(kinds, groups[0]?.per || 1, look, palette);
    this.#table(held, palette);
  }

  /** Draw one pixel per cell, enlarged, and lines between them: a thousand times cheaper than rectangles. */
  #cells(group, names, place, palette) {
    const { context } = this.surface, { top, size, columns, held, kinds } = place, number = group.cells.length;
    const lines = Math.ceil(number / columns), small = this.small, faint = this.chosen ? 0x40ffffff : -1;
    small.width = columns;
    small.height = Math.max(1, lines);
    const image = new ImageData(columns, small.height), pixels = new Uint32Array(image.data.buffer);
    const plain = [hexPixel(palette.free), hexPixel(palette.idle), hexPixel(palette.shared), hexPixel(palette.cached)], own = new Map();
    for (let i = 0; i < number; i++) {
      const kind = group.cells[i];
      kinds[kind] += 1;
      let pixel = plain[kind], name = "";
      if (kind === 1) {
        name = names.get(group.owners[i]) || "";
        if (name) {
          held.set(name, (held.get(name) || 0) + group.per);
          pixel = own.get(name);
          if (pixel === undefined) own.set(name, pixel = pixelOf(name, palette.isDark));
        }
      }
      pixels[i] = name && name === this.chosen ? pixel : pixel & faint;
    }
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, top, columns * size, small.height * size);
    if (size < 6) return;
    context.fillStyle = palette["bg-2"];
    for (let column = 1; column <= columns; column++) context.fillRect(column * size - 1, top, 1, lines * size);
    for (let each = 1; each <= lines; each++) context.fillRect(0, top + each * size - 1, columns * size, 1);
  }

  #legend(kinds, per, look, palette) {
    const all = kinds.reduce((a, b) => a + b, 0), colours = [palette.free, palette.forward, palette.shared, palette.cached];
    const items = CELL_NAMES.map((name, kind) => [colours[kind], `${name}: ${count(kinds[kind] * per)} (${percent(kinds[kind], all)})`]);
    if (look.host) items.push([palette.host, `host tier: ${count(look.host[0])} of ${count(look.host[1])} (${percent(look.host[0], look.host[1])})`]);
    if (per > 1) items.push(["", `a cell is ${per} blocks`]);
    syncChildren(this.legend, items, () => element("li", {}, element("i", { className: "dot" }), element("span")), (li, [colour, text]) => {
      li.firstChild.hidden = !colour;
      li.firstChild.style.background = colour;
      setText(li.lastChild, text);
    });
    this.legend.children[1].firstChild.classList.add("many");
  }

  #table(held, palette) {
    const sorted = [...held].sort((a, b) => b[1] - a[1]).slice(0, MAX_OWNERS);
    const make = () => element("tr", {}, element("td", {}, element("button", { type: "button", className: "link" }, element("i", { className: "dot" }), element("span"))),
      element("td"), element("td", { className: "num" }));
    syncChildren(this.owners, sorted, make, (row, [name, blocks]) => {
      const button = row.cells[0].firstChild, isChosen = this.chosen === name;
      if (row.dataset.name !== name || row.dataset.dark !== String(palette.isDark)) {
        row.dataset.name = name;
        row.dataset.dark = palette.isDark;
        button.firstChild.style.background = colourOf(name, palette.isDark);
        setText(button.lastChild, shortName(name));
        button.title = name;
        setText(row.cells[1], this.app.store.requests.get(name)?.tenant || "–");
      }
      setText(row.cells[2], count(blocks));
      if (row.classList.contains("chosen") !== isChosen || !button.hasAttribute("aria-pressed")) {
        row.classList.toggle("chosen", isChosen);
        button.setAttribute("aria-pressed", String(isChosen));
      }
    });
  }

  #hover(look, palette) {
    const { x, y } = this.surface.pointer;
    for (const { top, size, columns, group, names } of this.places) {
      const line = Math.floor((y - top) / size), column = Math.floor(x / size), index = line * columns + column;
      if (y < top || column >= columns || index >= group.cells.length) continue;
      const kind = group.cells[index], name = kind === 1 ? names.get(group.owners[index]) : "", first = index * group.per;
      const rows = [["is", CELL_NAMES[kind]]];
      if (name) {
        const request = this.app.store.requests.get(name);
        rows.push(["request", name, colourOf(name, palette.isDark)]);
        if (request) rows.push(["tenant", request.tenant || "–"], ["prompt, outputs", `${count(request.prompt)}, ${count(request.tokens)}`]);
      }
      showTip(this.surface, group.per > 1 ? `blocks ${first} to ${Math.min(group.blocks, first + group.per) - 1}` : `block ${first}`, rows);
      return;
    }
    hideTip();
  }
}
