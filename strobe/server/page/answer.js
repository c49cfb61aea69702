// One answer on the page: sections of coloured tokens, tool calls, the strip and figures.

import { element, number } from "./dom.js";
import { Sections } from "./sections.js";
import { Strip } from "./strip.js";

const OFF = "the request turned speculation off"; // intended, so not worth a note

/** The tokens on the page: span -> {answer, token}. */
export const tokenOf = new WeakMap();
/** The bars of all strips: element -> {answer, step}. */
export const stepOf = new WeakMap();

/** An answer during generation. Add its chunks, then call finish once. */
export class Answer {
  constructor(title, started = performance.now()) {
    this.sections = new Sections();
    this.spans = [];
    this.steps = []; // {drafted, accepted, spans, bar}
    this.parts = []; // {kind, element, tokens}
    this.calls = []; // {id, name, arguments, element}
    this.times = { started, first: null, last: null };
    this.firstTokens = 0;
    this.content = "";
    this.finishReason = null;
    this.usage = null;
    this.report = null;
    this.done = false;
    this.failed = false; // stopped or aborted

    this.strip = new Strip();
    this.body = element("div", { class: "parts" });
    this.notes = element("div", { class: "notes" });
    this.figures = element("dl", { class: "figures" });
    this.element = element(
      "section",
      { class: "answer running", "aria-label": title },
      element("h3", {}, title),
      this.body,
      this.notes,
      element("footer", {}, this.strip.element, this.figures),
    );
  }

  /** The tokens' joined text, markers included. */
  get raw() {
    return this.sections.raw;
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.spans.length;
  }

  /** Tokens per second after the first step, by the engine's clock; null before the end. */
  get rate() {
    const { started, first, last } = this.times;
    const decoded = this.numTokens - this.firstTokens;
    if (this.measured) return decoded / this.report.decode_seconds;
    if (first === null || !this.done) return null;
    if (last > first) return (1000 * decoded) / (last - first);
    return (1000 * this.numTokens) / (last - started);
  }

  /** Whether the server reported the engine's decoding time. */
  get measured() {
    return Boolean(this.report?.decode_seconds);
  }

  /** The answer as a message of the conversation, without calls that were cut off. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.calls.length && !this.failed) {
      message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }

  feed(chunk, time) {
    this.usage = chunk.usage ?? this.usage;
    this.report = chunk.speculation ?? this.report;
    const choice = chunk.choices?.[0];
    if (choice) {
      const delta = choice.delta ?? {};
      this.content += delta.content ?? "";
      this.finishReason = choice.finish_reason ?? this.finishReason;
      if (choice.step) this.addStep(choice.step, delta, time);
      else if (!this.steps.length) this.addText(delta, time);
      else this.place(this.sections.push([], null, delta));
      for (const call of delta.tool_calls ?? []) this.addCall(call);
    }
    this.describe();
  }

  addStep(step, delta, time) {
    const index = this.steps.length;
    const from = this.spans.length;
    this.place(this.sections.push(step.tokens, index, delta));
    const spans = this.spans.slice(from);
    const accepted = step.tokens.filter(([, isDraft]) => isDraft).length;
    const verify = index > 0 || step.drafted > 0; // not the prefill
    const bar = verify ? this.strip.add(step, spans.length - accepted, accepted) : null;
    if (bar) stepOf.set(bar, { answer: this, step: index });
    this.steps.push({ ...step, spans, bar });
    this.stamp(time, spans.length);
  }

  addText(delta, time) {
    const before = this.spans.length;
    this.place(this.sections.pushText(delta));
    if (this.spans.length > before) this.stamp(time, 1);
  }

  stamp(time, tokens) {
    if (this.times.first === null) this.firstTokens = tokens;
    this.times.first ??= time;
    this.times.last = time;
  }

  /** Put the tokens from `changed` on into their sections; only the last ones ever move. */
  place(changed) {
    for (let i = this.spans.length - 1; i >= changed; i--) this.spans[i].remove();
    while (this.parts.length && empty(this.parts.at(-1))) this.parts.pop().element.remove();
    for (let i = changed; i < this.sections.tokens.length; i++) {
      const token = this.sections.tokens[i];
      const span = (this.spans[i] ??= this.span(token));
      if (this.parts.at(-1)?.kind !== token.section) this.open(token.section);
      this.parts.at(-1).tokens.append(span);
    }
    for (let i = Math.max(0, changed - 1); i < this.spans.length; i++) {
      this.spans[i].classList.toggle("marker", this.sections.tokens[i].covered === null);
    }
  }

  span(token) {
    const origin = token.own === null ? "unknown" : token.own ? "own" : "accepted";
    const tabindex = this.spans.length ? -1 : 0; // one tab stop; arrow keys move from there
    const span = element("span", { class: `token ${origin}`, tabindex }, token.piece);
    tokenOf.set(span, { answer: this, token });
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

  /** Show the token count of thinking that has ended, and fold it if `folded`. */
  endThinking(folded) {
    const last = this.parts.at(-1);
    if (last?.kind !== "thinking") return;
    const count = last.tokens.childElementCount;
    const tokens = count === 1 ? "token" : "tokens";
    last.element.firstChild.textContent = `Thought for ${count} ${tokens}`;
    if (folded) last.element.open = false;
  }

  addCall({ index, id, function: part = {} }) {
    let call = this.calls[index];
    if (!call) {
      if (this.parts.at(-1)?.kind !== "call") this.open("call");
      call = { id, name: "", arguments: "", element: element("div", { class: "readable" }) };
      this.calls[index] = call;
      this.parts.at(-1).tokens.before(call.element);
    }
    call.id ??= id;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
    call.element.replaceChildren(
      element("p", {}, "Calls the tool ", element("b", {}, call.name)),
      ...argumentList(call.arguments),
    );
  }

  /** End the answer. note: a sentence that says why, null if the model ended it. */
  finish(note = null, kind = "note") {
    this.done = true;
    this.element.classList.remove("running");
    this.endThinking(false);
    if (this.finishReason === "length" && note === null) {
      note = `Stopped at ${number(this.numTokens)} tokens, its limit.`;
    }
    if (note !== null) {
      const role = kind === "error" ? "alert" : null;
      this.notes.append(element("p", { class: kind, role }, note));
    }
    this.describe();
  }

  /** Update the line of figures. */
  describe() {
    const { started, first } = this.times;
    const report = this.report;
    const rows = [];
    if (this.rate !== null) rows.push(["tokens/s", number(this.rate)]);
    if (first !== null) rows.push(["first token", `${number(first - started)} ms`]);
    const length = report?.acceptance_length ?? this.strip.acceptanceLength;
    if (length !== null) rows.push(["acceptance length", length.toFixed(1)]);
    const steps = report?.used ? report.steps : this.strip.steps;
    if (steps) rows.push(["verify steps", number(steps)]);
    if (this.spans.length) rows.push(["tokens", number(this.numTokens)]);
    if (report) {
      rows.push(report.used ? ["method", report.method] : ["speculation", why(report)]);
    }
    this.figures.replaceChildren(
      ...rows.map(([name, value]) =>
        element("div", { "data-name": name }, element("dt", {}, name), element("dd", {}, value)),
      ),
    );
  }
}

const empty = ({ kind, tokens }) => kind !== "call" && !tokens.hasChildNodes();

function why({ off_reason: reason }) {
  if (reason === OFF) return "off";
  return `off, because ${reason ?? "the server gave no reason"}`;
}

/** Arguments as a list of names and values, or as raw text while they are not a JSON object. */
function argumentList(text) {
  let values = null;
  try {
    values = JSON.parse(text);
  } catch {
    // incomplete, or not valid JSON
  }
  if (values === null || typeof values !== "object") return text ? [element("code", {}, text)] : [];
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const rows = Object.entries(values).flatMap(([name, value]) => [
    element("dt", {}, name),
    element("dd", {}, shown(value)),
  ]);
  return [element("dl", {}, ...rows)];
}
