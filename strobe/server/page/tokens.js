// An answer token by token, each in the colour of its origin, and the strip of accepted lengths.

import { collect, describe } from "./calls.js";
import { counted, element } from "./dom.js";
import { Sections } from "./sections.js";
import { Strip } from "./strip.js";

/** The tokens on the page: span -> {view, token}. */
export const tokenOf = new WeakMap();
/** Bars of strips and rejected drafts: element -> {view, first, last}, numbers of steps. */
export const stepOf = new WeakMap();

export class TokenView {
  constructor() {
    this.sections = new Sections();
    this.spans = [];
    this.rejected = []; // of the token with this index: the drafts that were rejected for it
    this.steps = []; // {drafted, accepted, spans, bar}
    this.parts = []; // {kind, element, tokens}
    this.calls = [];
    this.places = new Map(); // call -> its element
    this.strip = new Strip();
    this.body = element("div", { class: "parts" });
    this.element = element("div", { class: "by-token" }, this.body, this.strip.element);
  }

  feed({ delta, step }) {
    if (step) this.addStep(step, delta);
    else if (!this.steps.length) this.place(this.sections.pushText(delta));
    else this.place(this.sections.push([], null, delta));
    for (const call of collect(this.calls, delta.tool_calls)) {
      if (!this.places.has(call)) this.places.set(call, this.openCall());
      describe(call, this.places.get(call));
    }
  }

  addStep(step, delta) {
    const index = this.steps.length;
    const from = this.spans.length;
    this.place(this.sections.push(step.tokens, index, delta));
    const spans = this.spans.slice(from);
    const accepted = step.tokens.filter(([, isDraft]) => isDraft).length;
    const verify = index > 0 || step.drafted > 0; // not the prefill
    const bar = verify ? this.strip.add(step, spans.length - accepted, accepted) : null;
    if (bar) stepOf.set(bar, { view: this, first: stepOf.get(bar)?.first ?? index, last: index });
    for (const [i, span] of spans.slice(0, accepted).entries()) {
      if (step.confidence?.length) span.classList.add(`sure-${level(step.confidence[i])}`);
    }
    this.steps.push({ ...step, spans, bar });
    if (step.rejected?.length && spans.length > accepted) this.strike(from + accepted, index);
  }

  /** Show a step's rejected drafts before the token that took their place. */
  strike(place, index) {
    const { rejected, accepted, confidence } = this.steps[index];
    const drafts = rejected.map((text, i) => {
      const start = i === 0 ? text.trimStart() : text;
      const shown = i === rejected.length - 1 ? start.trimEnd() : start;
      const sure = confidence?.length ? `sure-${level(confidence[accepted + i])}` : "";
      return shown && element("span", { class: sure }, shown.replace(/\s*\n\s*/g, "↵"));
    });
    const struck = element("del", { class: "token rejected" }, ...drafts.filter(Boolean));
    if (!struck.textContent.trim()) struck.textContent = "␣";
    stepOf.set(struck, { view: this, first: index, last: index });
    this.rejected[place] = struck;
    this.spans[place].before(struck);
  }

  /** Put the tokens from `changed` on into their sections; only the last ones ever move. */
  place(changed) {
    for (let i = this.spans.length - 1; i >= changed; i--) {
      const line = this.spans[i].parentNode;
      this.spans[i].remove();
      this.rejected[i]?.remove();
      if (!line.hasChildNodes()) line.remove();
    }
    while (this.parts.length && empty(this.parts.at(-1))) this.parts.pop().element.remove();
    for (let i = changed; i < this.sections.tokens.length; i++) {
      const token = this.sections.tokens[i];
      const span = (this.spans[i] ??= this.span(token));
      if (this.parts.at(-1)?.kind !== token.section) this.open(token.section);
      const line = lastLine(this.parts.at(-1));
      if (this.rejected[i]) line.append(this.rejected[i]);
      line.append(span);
    }
    for (let i = Math.max(0, changed - 1); i < this.spans.length; i++) {
      this.spans[i].classList.toggle("marker", this.sections.tokens[i].covered === null);
    }
  }

  span(token) {
    const origin = token.own === null ? "unknown" : token.own ? "own" : "accepted";
    const tabindex = this.spans.length ? -1 : 0; // one tab stop; arrow keys move from there
    const span = element("span", { class: `token ${origin}`, tabindex }, token.piece);
    tokenOf.set(span, { view: this, token });
    return span;
  }

  open(kind) {
    this.endThinking(true);
    const name = { thinking: "Thinking", answer: "Answer", call: "Tool call" }[kind];
    const label = `${name}, token by token; the arrow keys move`;
    const tokens = element("div", { class: "tokens", role: "group", "aria-label": label });
    let part = tokens;
    if (kind === "thinking") {
      part = element(
        "details",
        { class: "thinking", open: true },
        element("summary", {}, "Thinking …"),
        tokens,
      );
    } else if (kind === "call") {
      part = element("div", { class: "call" }, tokens);
    }
    this.parts.push({ kind, element: part, tokens });
    this.body.append(part);
  }

  /** The place of a new call's description, before the call's tokens. */
  openCall() {
    if (this.parts.at(-1)?.kind !== "call") this.open("call");
    const place = element("div", { class: "readable" });
    this.parts.at(-1).tokens.before(place);
    return place;
  }

  /** Show the token count of thinking that has ended, and fold it if `folded`. */
  endThinking(folded) {
    const last = this.parts.at(-1);
    if (last?.kind !== "thinking") return;
    const count = last.tokens.querySelectorAll("span").length;
    last.element.firstChild.textContent = `Thought for ${counted(count, "token")}`;
    if (folded) last.element.open = false;
  }

  paint() {
    this.strip.follow();
  }

  finish() {
    this.endThinking(false);
    return null;
  }
}

/** How sure the drafter was of a draft, in four levels. */
const level = (confidence) => [0.5, 0.9, 0.99].filter((bound) => confidence > bound).length;

/** The line for the next token. A line is an element of its own, so that a new token moves only it. */
function lastLine({ tokens }) {
  const line = tokens.lastChild;
  if (line && !line.lastChild.textContent.endsWith("\n")) return line;
  return tokens.appendChild(element("div"));
}

/** A text with its invisible characters shown. */
export function visible(text) {
  const signs = { " ": "␣", "\n": "↵", "\t": "⇥" };
  return text.replace(/[\n\t]|^ | $/g, (blank) => signs[blank]) || "(no text)";
}

const empty = ({ kind, tokens }) => kind !== "call" && !tokens.hasChildNodes();
