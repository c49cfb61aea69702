// The comparison of answers to one request without and with speculation.

import { button, element, number } from "./dom.js";

export const ROUNDS = 3;

/**
 * The sentences under a race. off, on: the answers of the first round. race: {rounds: the rates
 * {off, on} of each finished round, seed, temperature, inTurns}.
 */
export function verdict(off, on, { rounds, seed, temperature, inTurns }) {
  const result = element("p", { class: "verdict" });
  const strips = [off, on].map(({ view }) => view.strip).filter(Boolean);
  for (const strip of strips) strip.scale(Math.max(...strips.map(({ height }) => height)));
  if (off.failed || on.failed) {
    result.append("No comparison: not both answers were completed.");
    return result;
  }
  if (on.report && !on.report.used) {
    const reason = on.report.off_reason ?? "the server gave no reason";
    const rested = on.report.method !== "none" && on.report.rested_steps > 0;
    result.append(`${rested ? "Drafting rested" : "The server did not speculate"}: ${reason}. `);
  } else {
    result.append(...speeds(rounds));
  }
  result.append(element("span", {}, sameness(off, on)));
  const order = inTurns ? "one after the other" : "at the same time";
  const heat = temperature ?? "the model’s own";
  const conditions = `All with seed ${seed} and temperature ${heat}, ${order}`;
  const clock = off.measured && on.measured ? "by the engine’s clock" : "as seen in this browser";
  result.append(element("small", {}, `${conditions}; rates after the first token, ${clock}.`));
  return element("div", {}, tracks(off, on, rounds), result);
}

/** The course of a comparison: a bar that fills with the runs, each counted by its tokens. */
export class Progress {
  constructor() {
    this.text = element("span");
    this.bar = element("progress", { max: 1, value: 0, "aria-label": "Progress of the comparison" });
    this.element = element("p", { class: "note progress" }, this.text, this.bar);
  }

  /** run: from 0; lane: "off" or "on"; share: of its tokens that are there, from 0 to 1. */
  show(run, lane, share) {
    this.text.textContent = `Run ${run + 1} of ${ROUNDS}, speculation ${lane}`;
    this.bar.value = (run + (lane === "on" ? 0.5 : 0) + Math.min(share, 1) / 2) / ROUNDS;
  }
}

/** The lanes' times at their median rates as bars, and a button that shows both answers again, as
 * they came but at those rates. */
function tracks(off, on, rounds) {
  const lanes = [
    { name: "off", answer: off },
    { name: "on", answer: on },
  ];
  for (const lane of lanes) {
    const rates = rounds.map((round) => round[lane.name]).filter((rate) => rate !== null);
    const times = rates.map((rate) => (1000 * lane.answer.numTokens) / rate);
    lane.ms = rates.length ? (1000 * lane.answer.numTokens) / median(rates) : lane.answer.duration;
    lane.range = [Math.min(lane.ms, ...times), Math.max(lane.ms, ...times)];
  }
  const longest = Math.max(...lanes.map(({ range }) => range[1]));
  if (!longest) return "";
  for (const lane of lanes) {
    lane.bar = element("i", { class: `lane ${lane.name}` });
    lane.bar.style.setProperty("--share", lane.ms / longest);
    const [from, to] = lane.range;
    const whisker = element("i", { class: "whisker", "aria-hidden": "true" });
    whisker.style.setProperty("--from", from / longest);
    whisker.style.setProperty("--to", to / longest);
    const [low, high] = [from, to].map((ms) => (ms / 1000).toFixed(2));
    const spread = low === high ? "" : ` (${low} to ${high})`;
    lane.row = element(
      "div",
      {},
      element("dt", {}, `Speculation ${lane.name}`),
      element("dd", {}, element("span", { class: "track" }, lane.bar, whisker),
        `${(lane.ms / 1000).toFixed(2)} s${spread}`),
    );
  }
  const again = button("Watch the race", () => run(lanes, longest, again));
  return element("div", { class: "race small" }, element("dl", {}, ...lanes.map(({ row }) => row)), again);
}

function run(lanes, longest, again) {
  again.disabled = true;
  const started = performance.now();
  const shows = lanes.map(({ answer }) => answer.replay());
  const frame = (now) => {
    const time = again.isConnected ? Math.max(now - started, 0) : Infinity;
    for (const [i, { answer, bar, ms }] of lanes.entries()) {
      bar.style.setProperty("--share", Math.min(time, ms) / longest);
      shows[i](time < ms ? (time * answer.duration) / ms : Infinity);
    }
    if (lanes.some(({ ms }) => time < ms)) requestAnimationFrame(frame);
    else again.disabled = false;
  };
  requestAnimationFrame(frame);
}

/** The comparison of the rounds' rates: by their medians if their ranges do not overlap. */
function speeds(rounds) {
  const off = rounds.map((round) => round.off).filter((rate) => rate !== null);
  const on = rounds.map((round) => round.on).filter((rate) => rate !== null);
  if (!off.length || !on.length) return [];
  const times = `${number(median(on) / median(off))}×`;
  const runs = off.length === 1 ? "one run each" : `medians of ${off.length} runs each`;
  if (off.length > 1 && Math.max(...on) >= Math.min(...off) && Math.max(...off) >= Math.min(...on)) {
    const ranges = `${range(off)} tokens/s without and ${range(on)} with speculation`;
    return [`The difference in speed is noise: ${ranges}. `];
  }
  const rates = `${number(median(off))} and ${number(median(on))} tokens/s, ${runs}`;
  return [element("strong", {}, times), " as fast with speculation. ", `${rates}. `];
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

const range = (values) => `${number(Math.min(...values))} to ${number(Math.max(...values))}`;

function sameness(off, on) {
  if (off.raw === on.raw) return "The texts are identical.";
  const [a, b] = [off.pieces, on.pieces];
  const at = a.findIndex((piece, i) => piece !== b[i]);
  return `The texts differ from token ${(at < 0 ? a.length : at) + 1} on.`;
}
