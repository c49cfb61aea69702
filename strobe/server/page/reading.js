// An answer to read: thinking, text in Markdown, tool calls.

import { collect, describe } from "./calls.js";
import { element } from "./dom.js";
import { loadParser } from "./markdown.js";
import { Prose } from "./prose.js";

export class ReadingView {
  constructor() {
    loadParser().catch(() => null); // while the model computes its first token
    this.element = element("div", { class: "parts reading" });
    this.parts = []; // {kind, element, prose, text}
    this.calls = [];
    this.places = new Map(); // call -> its element
    this.done = false;
  }

  feed({ delta }) {
    if (delta.reasoning_content) this.add("thinking", delta.reasoning_content);
    if (delta.content) this.add("answer", delta.content);
    for (const call of collect(this.calls, delta.tool_calls)) {
      if (!this.places.has(call)) this.places.set(call, this.open("call").element);
      describe(call, this.places.get(call));
    }
  }

  add(kind, text) {
    const last = this.parts.at(-1);
    // A line break alone between thinking and its end, or before a call, opens nothing.
    if (last?.kind !== kind && !text.trim()) return;
    const part = last?.kind === kind ? last : this.open(kind);
    part.text += text;
  }

  open(kind) {
    this.settle(this.parts.at(-1));
    const prose = element("div", { class: "prose" });
    const part = { kind, element: prose, text: "", prose: null };
    if (kind === "call") part.element = element("div", { class: "call" });
    else part.prose = new Prose(prose);
    if (kind === "thinking") {
      const summary = element("summary", {}, "Thinking …");
      part.element = element("details", { class: "thinking", open: true }, summary, prose);
    }
    this.parts.push(part);
    this.element.append(part.element);
    return part;
  }

  /** End a part that is not the last one. */
  settle(part, folded = true) {
    part?.prose?.update(part.text, false);
    if (part?.kind !== "thinking") return;
    part.element.firstChild.textContent = "Thoughts";
    if (folded) part.element.open = false;
  }

  paint() {
    const last = this.parts.at(-1);
    if (this.done) return;
    last?.prose?.update(last.text, true);
  }

  /** End the answer. Returns a promise of its display. */
  finish() {
    this.done = true;
    const last = this.parts.at(-1);
    this.settle(last, false);
    return last?.prose?.working;
  }
}
