// The settings: their dialog, what the browser keeps of them, and the fields of a request.

import { byId, element } from "./dom.js";

const STORED = "strobe.settings";
const KEY = "strobe.key"; // of the API: forgotten with the tab
const PRESETS = "strobe.presets";

/** Numbers: [request's field, label, its value that changes nothing, attributes]. */
const NUMBERS = [
  ["temperature", "Temperature", 1, { min: 0, max: 100, step: "any" }],
  ["top_p", "Top-p", 1, { min: 0, max: 1, step: "any" }],
  ["top_k", "Top-k", "off", { min: -1, step: 1 }],
  ["min_p", "Min-p", "off", { min: 0, max: 1, step: "any" }],
  ["repetition_penalty", "Repetition penalty", "off", { min: 0, max: 100, step: "any" }],
  ["presence_penalty", "Presence penalty", "off", { min: -2, max: 2, step: "any" }],
  ["frequency_penalty", "Frequency penalty", "off", { min: -2, max: 2, step: "any" }],
  ["seed", "Seed", "random", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }],
  ["max_tokens", "Max tokens", "all that fit", { min: 1, step: 1 }],
  ["min_tokens", "Min tokens", 0, { min: 0, step: 1 }],
];

const OWN_PRESETS = {
  "Model’s own": {},
  Greedy: { temperature: "0" },
  Varied: { temperature: "1", min_p: "0.05" },
};

const form = byId("options");
const dialog = byId("settings");
const fields = () => [...form.elements].filter((field) => field.name);
const field = (name) => form.elements.namedItem(name);
const isSampling = ({ name }) => NUMBERS.some(([known]) => known === name) || name === "stop";

for (const [name, label, , limits] of NUMBERS) {
  const inputmode = limits.step === 1 ? "numeric" : "decimal";
  const input = element("input", { name, type: "number", inputmode, ...limits });
  byId("numbers").append(element("label", {}, label, input));
}

// ---- what the browser keeps ----

/** A value that the browser keeps, null without one or without storage. */
export function recall(name, storage = "localStorage") {
  try {
    return globalThis[storage].getItem(name);
  } catch {
    return null; // turned off in this browser
  }
}

export function remember(name, value, storage = "localStorage") {
  try {
    globalThis[storage].setItem(name, value);
  } catch {
    // turned off in this browser: it lasts as long as the page
  }
}

function recallJson(name) {
  try {
    return JSON.parse(recall(name) ?? "{}");
  } catch {
    return {};
  }
}

export function restore() {
  set(recallJson(STORED));
  field("key").value = recall(KEY, "sessionStorage") ?? "";
  showPresets();
}

export function store() {
  const { key, ...values } = Object.fromEntries(fields().map((one) => [one.name, valueOf(one)]));
  remember(STORED, JSON.stringify(values));
  remember(KEY, key, "sessionStorage");
  showPresets();
}

const valueOf = (one) => (one.type === "checkbox" ? one.checked : one.value);

function set(values) {
  for (const one of fields().filter(({ name }) => name in values)) {
    if (one.type === "checkbox") one.checked = values[one.name];
    else one.value = values[one.name];
  }
}

let viewName = "reading";

/** The view of answers, "reading" or "tokens". */
export function view() {
  viewName = recall("strobe.view") ?? viewName;
  return viewName === "tokens" ? "tokens" : "reading";
}

export function setView(name) {
  viewName = name;
  remember("strobe.view", name);
}

// ---- presets of the sampling ----

const presets = () => ({ ...OWN_PRESETS, ...recallJson(PRESETS) });

function sampling() {
  const set = fields().filter((one) => isSampling(one) && one.value !== "");
  return Object.fromEntries(set.map((one) => [one.name, one.value]));
}

/** Show the presets, and which one the settings are. */
function showPresets() {
  const now = JSON.stringify(sampling());
  const all = Object.entries(presets());
  const match = all.find(([, values]) => JSON.stringify(values) === now)?.[0];
  const select = byId("preset");
  select.replaceChildren(
    ...(match ? [] : [element("option", { value: "" }, "your own")]),
    ...all.map(([name]) => element("option", { value: name }, name)),
  );
  select.value = match ?? "";
  byId("preset-name").hidden = Boolean(match);
  byId("remove-preset").hidden = !match || match in OWN_PRESETS;
}

function choosePreset(name) {
  for (const one of fields().filter(isSampling)) one.value = presets()[name]?.[one.name] ?? "";
  form.dispatchEvent(new Event("input"));
}

function changePresets(change) {
  const own = recallJson(PRESETS);
  change(own);
  remember(PRESETS, JSON.stringify(own));
  showPresets();
}

byId("preset").addEventListener("change", ({ target }) => choosePreset(target.value));
byId("save-preset").addEventListener("click", () => {
  const name = byId("new-preset").value.trim();
  if (!name) return byId("new-preset").focus();
  changePresets((own) => (own[name] = sampling()));
  byId("new-preset").value = "";
});
byId("remove-preset").addEventListener("click", () =>
  changePresets((own) => delete own[byId("preset").value]),
);

// ---- what the server offers ----

/** Speculation as the page asks for it: with the drafts that are rejected. */
export const SHOWN = { return_drafts: true };

let defaults = {}; // the server's own sampling
let thinks = true; // whether the model's chat template can turn thinking on and off

/** Offer what the server has, and show its defaults. */
export function fitTo({ engine, template }) {
  const { reasoning, tools, variables } = template;
  defaults = engine.sampling;
  const reads = (name) => variables === null || variables.includes(name);
  thinks = reasoning !== null && reads("enable_thinking");
  field("thinking").closest("label").hidden = !thinks;
  field("effort").closest("label").hidden = variables === null || !reads("reasoning_effort");
  field("tools").closest("label").hidden = tools === null;
  for (const [name, , off] of NUMBERS) {
    field(name).placeholder = engine.sampling[name] ?? off;
  }
  const chosen = field("speculation").value;
  const methods = engine.methods.filter((method) => method !== "none");
  field("speculation").replaceChildren(
    element("option", { value: "on" }, methods.length ? `on (${methods[0]})` : "on"),
    ...methods.slice(1).map((method) => element("option", { value: method }, method)),
    element("option", { value: "off" }, "off"),
  );
  field("speculation").value = chosen;
  if (!field("speculation").value) field("speculation").value = "on";
}

// ---- examples ----

let adopted = ""; // the tools that an example put into the field

/** Adopt an example's thinking switch and tools; tools that the user entered stay. */
export function adopt({ thinking, tools }) {
  dropAdopted();
  field("thinking").checked = thinking;
  if (tools) field("tools").value = adopted = JSON.stringify(tools, null, 1);
  store();
}

/** Remove an example's tools if the user has not changed them. */
export function dropAdopted() {
  if (field("tools").value === adopted) field("tools").value = "";
  adopted = "";
  store();
}

// ---- checks ----

/** Open the dialog at a field. */
export function openAt(name) {
  if (!dialog.open) dialog.showModal();
  field(name).focus();
}

/** Whether all settings are valid; opens the dialog at the first invalid one. */
export function valid() {
  check("tools", (value) => Array.isArray(value), "Tools must be a JSON list: [ … ].");
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  check("schema", isObject, "The schema must be a JSON object: { … }.");
  const wrong = fields().find((one) => !one.checkValidity());
  if (wrong) {
    openAt(wrong.name);
    wrong.reportValidity();
  }
  return !wrong;
}

function check(name, isRight, sentence) {
  const text = field(name).value.trim();
  let problem = "";
  try {
    if (text && !isRight(JSON.parse(text))) problem = sentence;
  } catch (error) {
    problem = `This is not JSON: ${error.message}`;
  }
  field(name).setCustomValidity(problem);
}

function json(name) {
  const text = field(name).value.trim();
  return text ? JSON.parse(text) : null;
}

// ---- use ----

export const apiKey = () => field("key").value.trim();
export const inTurns = () => field("order").value === "turns";
export const systemMessage = () => field("system").value.trim();

/** The chat request's fields from the settings; empty settings are left out. */
export function request() {
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    include_speculation: true,
    speculation: speculation(),
  };
  if (thinks) body.chat_template_kwargs = { enable_thinking: field("thinking").checked };
  if (field("effort").value) body.reasoning_effort = field("effort").value;
  for (const [name] of NUMBERS) {
    if (field(name).value !== "") body[name] = field(name).valueAsNumber;
  }
  const stop = field("stop").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  const schema = json("schema");
  if (schema) body.structured_outputs = { json: schema };
  const tools = json("tools");
  if (tools?.length) body.tools = tools;
  return body;
}

function speculation() {
  const method = field("speculation").value;
  if (method === "off") return false;
  const always = field("always").checked ? { always: true } : {};
  return { ...(method !== "on" && { method }), ...SHOWN, ...always };
}

/** Adopt the settings of a request, as `request` makes it, until the page is left or they change. */
export function adoptRequest(body) {
  const { method, always = false } = body.speculation || {};
  const values = {
    system: body.system ?? "",
    thinking: body.chat_template_kwargs?.enable_thinking ?? true,
    effort: body.reasoning_effort ?? "",
    stop: (body.stop ?? []).join("\n"),
    schema: body.structured_outputs ? JSON.stringify(body.structured_outputs.json, null, 1) : "",
    tools: body.tools ? JSON.stringify(body.tools, null, 1) : "",
    speculation: body.speculation === false ? "off" : (method ?? "on"),
    always,
  };
  for (const [name] of NUMBERS) values[name] = String(body[name] ?? "");
  set(values);
  showPresets();
}

/** Why an answer with another seed is the same as before. */
export function whyTheSame() {
  const value = (name) => (field(name).value === "" ? defaults[name] : field(name).valueAsNumber);
  const greedy = value("temperature") === 0 ? "temperature 0" : value("top_k") === 1 && "top-k 1";
  if (!greedy) return "The same text as before, although the seed is another one.";
  return (
    `The same text as before: at ${greedy} the likeliest token is taken every time, ` +
    "whatever the seed. Raise it in the settings for another answer."
  );
}

/** A summary of the settings for the line under the message. */
export function inEffect() {
  const words = [];
  const { value: method } = field("speculation");
  if (thinks) words.push(`thinking ${field("thinking").checked ? "on" : "off"}`);
  const always = method !== "off" && field("always").checked;
  words.push(`speculation ${method}${always ? ", in every step" : ""}`);
  for (const [name, label] of NUMBERS) {
    if (field(name).value !== "") words.push(`${label.toLowerCase()} ${field(name).value}`);
  }
  if (systemMessage()) words.push("system message");
  if (field("schema").value.trim()) words.push("JSON schema");
  try {
    const names = (json("tools") ?? []).map((tool) => tool?.function?.name ?? "unnamed");
    if (names.length) words.push(`tools: ${names.join(", ")}`);
  } catch {
    words.push("tools: not JSON");
  }
  return words.join(" · ");
}
