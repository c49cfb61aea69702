// Tool calls of an answer: their collection from deltas, and their display.

import { element } from "./dom.js";

/** Add the deltas of tool calls to `calls`: {id, name, arguments}. Returns the calls they are of. */
export function collect(calls, deltas = []) {
  return deltas.map(({ index, id, function: part = {} }) => {
    const call = (calls[index] ??= { id: null, name: "", arguments: "" });
    call.id ??= id;
    call.name += part.name ?? "";
    call.arguments += part.arguments ?? "";
    return call;
  });
}

/** Show a call in an element. */
export function describe(call, place) {
  place.replaceChildren(
    element("p", {}, "Calls the tool ", element("b", {}, call.name)),
    ...argumentList(call.arguments),
  );
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
