// What two answers to the same request say about speculation.

import { element, number } from "./dom.js";

/** The sentences under a comparison. body: what both were asked. */
export function verdict(off, on, body, inTurns) {
  const result = element("p", { class: "verdict" });
  for (const { strip } of [off, on]) strip.scale(Math.max(off.strip.height, on.strip.height));
  if (off.failed || on.failed) {
    result.append("No comparison: not both answers came to their end.");
    return result;
  }
  const { times, measure } = rates(off, on);
  if (on.report && !on.report.used) {
    const reason = on.report.off_reason ?? "the server gave no reason";
    result.append(`The server did not speculate: ${reason}. `);
  } else if (times !== null) {
    const much = `${number(times)}×`;
    result.append(element("strong", {}, much), " as fast with speculation. ");
  }
  result.append(element("span", {}, sameness(off, on)));
  const temperature = body.temperature ?? "the model’s own";
  const how = inTurns ? "one after the other" : "at the same time";
  const same = `Both with seed ${body.seed} and temperature ${temperature}, ${how}`;
  result.append(element("small", {}, `${same}; ${measure}, as seen in this browser.`));
  return result;
}

/** The speed-up, null where it is not known, and how it was measured. */
function rates(off, on) {
  const streamed = [off, on].every(({ times }) => times.last > times.first);
  const whole = ({ numTokens, times }) => (1000 * numTokens) / (times.last - times.started);
  const rate = streamed ? (answer) => answer.rate : whole;
  const measure = `rates ${streamed ? "after" : "with the wait for"} the first token`;
  const known = off.times.first !== null && on.times.first !== null;
  return { times: known ? rate(on) / rate(off) : null, measure };
}

function sameness(off, on) {
  if (off.raw === on.raw) return "The texts are identical.";
  const pieces = ({ sections }) => sections.tokens.map(({ piece }) => piece);
  const [a, b] = [pieces(off), pieces(on)];
  const at = a.findIndex((piece, i) => piece !== b[i]);
  return `The texts differ from token ${(at < 0 ? a.length : at) + 1} on.`;
}
