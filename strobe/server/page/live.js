// The line about the server: its load and its drafting now, from one stream of events.

import { counted, element, number } from "./dom.js";
import { serverEvents } from "./stream.js";

const WINDOW = 3; // seconds over which rates are taken
const RETRY = 2000; // milliseconds between two attempts to connect

export class Live {
  /** place: where the line is shown; onChange: called with the server's problem, a sentence, or
   * null when it can answer again. */
  constructor(place, onChange) {
    this.place = place;
    this.onChange = onChange;
    this.problem = null;
    this.events = []; // of the last seconds
    this.connection = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  /** Connect, and connect again whenever the stream ends. key: of the API. */
  async start(key = this.key) {
    this.key = key;
    this.stop();
    const { signal } = (this.connection = new AbortController());
    while (!signal.aborted) {
      try {
        for await (const state of serverEvents(key, signal)) this.take(state);
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401 || error.status === 403) return this.clear();
        this.take({ problem: error.message });
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }

  stop() {
    this.connection?.abort();
  }

  take(state) {
    if (state.problem !== this.problem) {
      this.problem = state.problem;
      this.onChange(state.problem);
    }
    if (state.problem) return this.clear(); // it is told elsewhere, once
    if (state.tokens === undefined) return this.clear("idle"); // since the engine started
    if (state.tokens < (this.events.at(-1)?.tokens ?? 0)) this.events = []; // another engine
    this.events.push(state);
    while (this.events.length > 2 && state.time - this.events[1].time > WINDOW) this.events.shift();
    this.show();
  }

  clear(text) {
    this.events = [];
    this.place.replaceChildren(...(text ? [text] : []));
  }

  show() {
    const now = this.events.at(-1);
    const [first] = this.events;
    const since = (name) => now[name] - first[name];
    const busy = now.running + now.waiting > 0;
    const words = [busy ? `${now.running} running` : "idle"];
    if (now.waiting) words.push(`${now.waiting} waiting`);
    if (busy && since("time") > 0) words.push(`${number(since("tokens") / since("time"))} tokens/s`);
    const parts = [words.join(" · ")];
    if (busy && since("draft_steps")) {
      const length = 1 + since("accepted") / since("draft_steps");
      const kept = `${number(since("accepted"))} of ${counted(since("verified"), "draft")} kept`;
      parts.push(` · ${length.toFixed(1)} per step `, meter(since("accepted") / since("verified")), kept);
    }
    parts.push(` · K/V ${number(100 * now.kv_used)} %`);
    this.place.replaceChildren(...parts);
  }
}

function meter(share) {
  const bar = element("i", { class: "meter", "aria-hidden": "true" });
  bar.style.setProperty("--share", share);
  return bar;
}
