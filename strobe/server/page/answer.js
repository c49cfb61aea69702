// One answer on the page: its stream, one of two views of it, and its figures.

import { collect } from "./calls.js";
import { element, number } from "./dom.js";
import { ReadingView } from "./reading.js";
import { TokenView } from "./tokens.js";

const OFF = "the request turned speculation off"; // intended, so not worth a note

/** An answer during generation. Add its chunks, call paint once a frame, and finish once. */
export class Answer {
  /** view: "reading" or "tokens". */
  constructor(title, view) {
    this.parts = []; // {delta, step} of each chunk, of which views are made
    this.calls = []; // {id, name, arguments}
    this.times = { started: performance.now(), first: null, last: null };
    this.content = "";
    this.raw = ""; // the tokens' text, markers included
    this.pieces = [];
    this.firstTokens = 0;
    this.verified = { steps: 0, accepted: 0 }; // steps that carried drafts
    this.finishReason = null;
    this.usage = null;
    this.report = null;
    this.done = false;
    this.failed = false; // stopped or aborted
    this.ending = null; // the sentence that says why it ended, if the model did not end it
    this.before = { pieces: 0, tokens: 0 }; // those of the streams that this one continues

    this.notes = element("div", { class: "notes" });
    this.figures = element("dl", { class: "figures" });
    this.element = element(
      "div",
      { class: "answer running", role: "group", "aria-label": title },
      element("h3", {}, title),
      element("div"),
      this.notes,
      element("footer", {}, this.figures),
    );
    this.show(view);
  }

  /** Make an answer of what `record` returned. */
  static restore(title, view, record) {
    const answer = new Answer(title, view);
    for (const part of record.parts) answer.add(part, null);
    const { usage, report, finishReason, failed, times, firstTokens, before } = record;
    Object.assign(answer, { usage, report, finishReason, failed, times, firstTokens, before });
    answer.finish(record.ending, record.failed ? "error" : "note");
    return answer;
  }

  /** The answer as plain data. */
  get record() {
    const { parts, usage, report, finishReason, failed, firstTokens, before, ending } = this;
    const { started, first, last } = this.times;
    const times = { started: 0, first: first && first - started, last: last && last - started };
    return { parts, usage, report, finishReason, failed, firstTokens, before, ending, times };
  }

  /** Begin another stream, which continues this answer. */
  resume() {
    this.before = { pieces: this.pieces.length, tokens: this.numTokens };
    this.times = { started: performance.now(), first: null, last: null };
    this.usage = this.report = this.finishReason = this.ending = null;
    this.done = this.failed = this.view.done = false;
    this.notes.replaceChildren();
    this.element.classList.add("running");
  }

  /** Show another view, made of all chunks so far. */
  show(view) {
    const now = view === "tokens" ? new TokenView() : new ReadingView();
    for (const part of this.parts) now.feed(part);
    this.element.children[1].replaceWith(now.element);
    this.view = now;
    if (this.done) now.finish();
    else now.paint();
  }

  /** Milliseconds from the request to the last token. */
  get duration() {
    const { started, last } = this.times;
    return last === null ? 0 : last - started;
  }

  /** Show the answer again as it came. Returns a function that shows it up to a time in ms. */
  replay() {
    const view = this.view instanceof TokenView ? new TokenView() : new ReadingView();
    this.view.element.replaceWith(view.element);
    this.view = view;
    let next = 0;
    return (time) => {
      while (next < this.parts.length && (this.parts[next].at ?? 0) <= time) {
        view.feed(this.parts[next++]);
      }
      view.paint();
      if (time >= this.duration) view.finish();
    };
  }

  get numTokens() {
    const { pieces, tokens } = this.before;
    return tokens + (this.usage?.completion_tokens ?? this.pieces.length - pieces);
  }

  /** Tokens per second after the first step, by the engine's clock; null before the end. */
  get rate() {
    const { started, first, last } = this.times;
    const tokens = this.numTokens - this.before.tokens;
    const decoded = tokens - this.firstTokens;
    if (this.measured) return decoded / this.report.decode_seconds;
    if (first === null || !this.done) return null;
    if (last > first) return (1000 * decoded) / (last - first);
    return (1000 * tokens) / (last - started);
  }

  /** Whether the server reported the engine's decoding time. */
  get measured() {
    return Boolean(this.report?.decode_seconds);
  }

  /** Mean tokens per step that carried drafts, null before the first one. */
  get acceptanceLength() {
    const { steps, accepted } = this.verified;
    const counted = steps ? 1 + accepted / steps : null;
    return this.before.tokens ? counted : (this.report?.acceptance_length ?? counted);
  }

  /** The answer as a node of a conversation, without calls that were cut off. */
  get node() {
    const calls = this.failed ? [] : this.calls;
    return { role: "assistant", content: this.content, calls, record: this.record };
  }

  feed(chunk, time) {
    this.usage = chunk.usage ?? this.usage;
    this.report = chunk.speculation ?? this.report;
    for (const warning of chunk.warnings ?? []) this.note(warning);
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.add({ delta: choice.delta ?? {}, step: choice.step ?? null }, time);
  }

  add(part, time) {
    this.content += part.delta.content ?? "";
    collect(this.calls, part.delta.tool_calls);
    if (time !== null) part.at = Math.round(time - this.times.started);
    this.count(part, time);
    this.parts.push(part);
    this.view.feed(part);
  }

  count({ delta, step }, time) {
    const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
    const pieces = step ? step.tokens.map(([piece]) => piece) : this.hasSteps || !text ? [] : [text];
    if (step?.drafted) {
      this.verified.steps += 1;
      this.verified.accepted += step.accepted;
    }
    this.hasSteps ||= Boolean(step);
    if (!step && !pieces.length) return;
    this.pieces.push(...pieces);
    this.raw += pieces.join("");
    if (time === null) return;
    if (this.times.first === null) this.firstTokens = pieces.length;
    this.times.first ??= time;
    this.times.last = time;
  }

  /** Bring the page up to date, once a frame. */
  paint() {
    this.describe();
    this.view.paint(); // which measures, so nothing may change after it
  }

  note(text, kind = "note") {
    this.notes.append(element("p", { class: kind, role: kind === "error" ? "alert" : null }, text));
  }

  /** End an answer that is not complete. Returns a promise of its display. */
  fail(note, kind) {
    this.failed = true;
    return this.finish(note, kind);
  }

  /** End the answer. note: a sentence that says why, null if the model ended it. Returns a promise
   * of its display. */
  finish(note = null, kind = "note") {
    this.done = true;
    this.ending = note;
    this.element.classList.remove("running");
    const shown = this.view.finish();
    if (this.finishReason === "length" && note === null) {
      note = `Stopped at ${number(this.numTokens)} tokens, its limit.`;
    }
    if (this.finishReason === "repetition" && note === null) {
      note = "Stopped because it repeated itself.";
    }
    if (note !== null) this.note(note, kind);
    this.describe();
    return shown;
  }

  /** Update the line of figures. */
  describe() {
    const { started, first } = this.times;
    const report = this.report;
    const rows = [];
    if (this.rate !== null) rows.push(["tokens/s", number(this.rate)]);
    if (first !== null) rows.push(["first token", `${number(first - started)} ms`]);
    const length = this.acceptanceLength;
    if (length !== null) rows.push(["acceptance length", length.toFixed(1)]);
    const steps = report?.used && !this.before.tokens ? report.steps : this.verified.steps;
    if (steps) rows.push(["verify steps", number(steps)]);
    if (this.pieces.length) rows.push(["tokens", number(this.numTokens)]);
    if (report) {
      rows.push(report.used ? ["method", report.method] : absence(report));
    }
    const old = new Map([...this.figures.children].map((row) => [row.dataset.name, row]));
    this.figures.replaceChildren(
      ...rows.map(([name, value]) => {
        const row =
          old.get(name) ??
          element("div", { "data-name": name }, element("dt", {}, name), element("dd"));
        if (row.lastChild.textContent !== value) row.lastChild.textContent = value;
        return row;
      }),
    );
  }
}

/** The row of an answer without drafts: drafting may be on and have rested all the time. */
function absence({ method, rested_steps: rested, off_reason: reason }) {
  if (reason === OFF) return ["speculation", "off"];
  const because = `because ${reason ?? "the server gave no reason"}`;
  if (method === "none") return ["speculation", `off, ${because}`];
  return ["drafting", rested ? `rested, ${because}` : `not begun, ${because}`];
}
