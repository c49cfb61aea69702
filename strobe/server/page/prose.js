// An element with a text in Markdown. It builds its own elements of the text's blocks, so that no
// text becomes markup. A text that grows is parsed from its last block on.

import { pendingColours } from "./code.js";
import { copyButton, element } from "./dom.js";
import { showFormula } from "./formula.js";
import { loadParser } from "./markdown.js";

const SHARE = 4; // of the time that parsing took passes before a text is parsed again
const MAX_CHARS = 200_000; // of the longest text that is parsed

/** An element with a text that may grow. */
export class Prose {
  constructor(place) {
    this.element = place;
    this.parser = loadParser().catch(() => null);
    this.text = "";
    this.shown = null; // the text on the page, as [text, whether it was open]
    this.numFinal = 0; // elements that will not change, and the text before the one after them
    this.from = 0;
    this.open = true;
    this.working = null;
  }

  /** Show a text. open: it will grow. Returns a promise of its display. */
  update(text, open) {
    this.text = text;
    this.open = open;
    return (this.working ??= this.work().finally(() => (this.working = null)));
  }

  async work() {
    const parse = await this.parser;
    while (this.shown?.[0] !== this.text || this.shown[1] !== this.open) {
      const { text, open } = this;
      const started = performance.now();
      this.show(blocks(parse, text.slice(open ? this.from : 0), open), text, open);
      const pause = SHARE * (performance.now() - started);
      if (open && this.open) await new Promise((resolve) => setTimeout(resolve, pause));
      if (!open && pendingColours()) {
        await pendingColours();
        this.shown = null; // show it again with them
      }
    }
  }

  show(blocks, text, open) {
    if (!open) this.numFinal = this.from = 0;
    patch(this.element, blocks.map(({ node }) => node), this.numFinal);
    this.shown = [text, open];
    if (open && blocks.length > 1) {
      this.numFinal += blocks.length - 1;
      for (let line = blocks.at(-1).line; line > 0; line--) {
        this.from = text.indexOf("\n", this.from) + 1;
      }
    }
  }
}

/** The blocks of a text; the text itself where it is too long or cannot be parsed. */
function blocks(parse, text, open) {
  if (!text.trim()) return [];
  try {
    if (parse && text.length <= MAX_CHARS) return parse(text, open);
  } catch (error) {
    console.error(error);
  }
  return [{ line: 0, node: ["p", { plain: true }, text] }];
}

const inner = new WeakMap(); // frame of a block of code or a table -> the element that it frames

/** Make the children of an element from `first` on equal to nodes, changing what differs only. */
function patch(parent, nodes, first = 0) {
  for (const [i, node] of nodes.entries()) {
    const old = parent.childNodes[first + i];
    if (typeof node === "string") patchText(parent, old, node);
    else patchElement(parent, old, node);
  }
  while (parent.childNodes.length > first + nodes.length) parent.lastChild.remove();
}

function patchText(parent, old, text) {
  if (old?.nodeType !== Node.TEXT_NODE) put(parent, old, document.createTextNode(text));
  else if (text.startsWith(old.data)) old.appendData(text.slice(old.data.length));
  else old.data = text;
}

function patchElement(parent, old, [tag, attributes, ...children]) {
  const now = old?.nodeType === Node.ELEMENT_NODE && (inner.get(old) ?? old);
  const target = now && (now.dataset.tag ?? now.localName) === tag ? now : make(tag, parent, old);
  const { href, start, language, plain, display, checked } = attributes;
  target.className = plain ? "plain" : (attributes.class ?? "");
  if (tag === "a") target.href = href;
  if (tag === "ol" && start !== undefined) target.start = start;
  if (tag === "pre") target.closest(".code").firstChild.firstChild.textContent = language || "text";
  if (tag === "input") {
    target.checked = checked === true;
    target.ariaLabel = checked ? "done" : "to do";
  }
  if (tag === "math") {
    target.className = display ? "formula display" : "formula";
    target.tabIndex = display ? 0 : -1; // a wide one scrolls
    return showFormula(target, children.join(""), display === true);
  }
  patch(target, children);
}

/** Put a new element into the place of an old one. Returns the element for its children. */
function make(tag, parent, old) {
  let frame;
  let target;
  if (tag === "pre") {
    target = element("code", { "data-tag": "pre" });
    const head = element("header", {}, element("span"), copyButton(() => target.textContent));
    frame = element("div", { class: "code" }, head, element("pre", { tabindex: 0 }, target));
  } else if (tag === "table") {
    target = element("table");
    frame = element("div", { class: "table", tabindex: 0 }, target);
  } else if (tag === "math") {
    target = frame = element("span", { "data-tag": "math" });
  } else if (tag === "input") {
    target = frame = element("input", { type: "checkbox", disabled: true });
  } else {
    target = frame = element(tag);
    if (tag === "a") Object.assign(target, { target: "_blank", rel: "noopener noreferrer" });
  }
  if (frame !== target) inner.set(frame, target);
  put(parent, old, frame);
  return target;
}

function put(parent, old, node) {
  if (old) old.replaceWith(node);
  else parent.append(node);
}
