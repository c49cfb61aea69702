// Text files: those attached to a message, and those saved.

import { button, element, number } from "./dom.js";

const MAX_BYTES = 1 << 20;

/** Files attached to the next message, shown in `place`. */
export class Attachments {
  constructor(place, onChange) {
    this.place = place;
    this.onChange = onChange;
    this.files = []; // {name, text}
  }

  /** Add files. Returns a sentence for each one that is not a text. */
  async add(files) {
    const problems = [];
    for (const file of files) {
      const text = file.size > MAX_BYTES ? null : await readText(file);
      if (text !== null) this.files.push({ name: file.name, text });
      else if (file.size <= MAX_BYTES) problems.push(`${file.name} is not a text file.`);
      else problems.push(`${file.name} has ${size(file.size)}, more than ${size(MAX_BYTES)}.`);
    }
    this.show();
    return problems;
  }

  /** Return the files and forget them. */
  take() {
    const files = this.files;
    this.set([]);
    return files;
  }

  set(files) {
    this.files = files;
    this.show();
  }

  show() {
    this.place.replaceChildren(
      ...this.files.map((file) => {
        const drop = button("✕", () => this.set(this.files.filter((other) => other !== file)), {
          "aria-label": `Remove ${file.name}`,
        });
        return element("li", { class: "chip" }, file.name, drop);
      }),
    );
    this.place.hidden = !this.files.length;
    this.onChange();
  }
}

async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

const size = (bytes) => `${number(bytes / 1024)} KB`;

/** Save a text or a Blob as a file. */
export function save(name, content, type = "text/plain") {
  const address = URL.createObjectURL(
    content instanceof Blob ? content : new Blob([content], { type }),
  );
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1e4);
}

/** A title as the beginning of a file's name. */
export function fileName(title, ending) {
  const words = title.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? ["conversation"];
  return `${words.slice(0, 8).join("-")}.${ending}`;
}
