// Images of the next message: pasted, dropped or chosen.
// Owns: reading and scaling them, and their thumbnails. Does not: send them.
// Invariant: an image that is kept is a data URL of a format that servers read, with sides of at most MAX_SIDE pixels.

import { button, make } from "./chat-dom.js";

export const IMAGE_URL = /^data:image\/(?:png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/=]+$/;
export const MAX_IMAGES = 8;
const MAX_SIDE = 1024;

/** Make the element of an image; `src` is a data URL. */
export const imageOf = (src) => make("img", { class: "attached", src: IMAGE_URL.test(src) ? src : "", alt: "An image of this message" });

/** The images that the next message will have. `report` shows an error. */
export class Attachments {
  constructor(place, report) {
    this.place = place;
    this.report = report;
    this.urls = [];
    this.isTaken = true; // by the model
  }

  /** Take images from pastes, drops on the page and the picker. */
  listen(text, opener, picker) {
    this.opener = opener;
    opener.addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.add(picker.files).then(() => (picker.value = ""));
    });
    text.addEventListener("paste", (event) => this.#from(event, event.clipboardData));
    document.addEventListener("dragover", (event) => event.dataTransfer?.types.includes("Files") && event.preventDefault());
    document.addEventListener("drop", (event) => this.#from(event, event.dataTransfer));
  }

  /** Show the button for images if the chosen one of the models takes them. */
  offerTo(models, chosen) {
    this.isTaken = models.find((one) => one.id === chosen)?.takesImages ?? true;
    this.opener.hidden = !this.isTaken;
  }

  /** Add the images among these files. */
  async add(files) {
    for (const file of [...files].filter((one) => one.type.startsWith("image/"))) {
      if (!this.isTaken) {
        this.report("This model takes no images.");
        return;
      }
      if (this.urls.length >= MAX_IMAGES) {
        this.report(`A message can have at most ${MAX_IMAGES} images.`);
        break;
      }
      try {
        this.urls.push(await scaled(file));
      } catch {
        this.report(`${file.name || "This image"} cannot be read as an image.`);
      }
    }
    this.#draw();
  }

  /** Return the images, and hold none from now on. */
  take() {
    const { urls } = this;
    this.put([]);
    return urls;
  }

  /** Hold these images. */
  put(urls) {
    this.urls = urls;
    this.#draw();
  }

  #from(event, data) {
    const files = [...(data?.files ?? [])].filter((one) => one.type.startsWith("image/"));
    if (!files.length) return;
    event.preventDefault();
    this.add(files);
  }

  #draw() {
    this.place.replaceChildren(
      ...this.urls.map((url, index) => {
        const remove = button("×", { class: "button quiet small", title: "Remove this image" }, () => this.put(this.urls.filter((_, other) => other !== index)));
        return make("span", { class: "attachment" }, imageOf(url), remove);
      }),
    );
    this.place.hidden = !this.urls.length;
  }
}

async function scaled(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return canvas.toDataURL("image/jpeg", 0.9);
}
