// The settings, in the dialog and in the tab's session storage, and their request fields.

import { byId } from "./dom.js";

const STORED = "strobe.settings";
const form = byId("options");
const dialog = byId("settings");
const fields = () => [...form.elements].filter((field) => field.name);
const field = (name) => form.elements.namedItem(name);

/** Settings last as long as the tab; without storage, as long as the page. */
export function restore() {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    for (const one of fields()) {
      if (!(one.name in stored)) continue;
      if (one.type === "checkbox") one.checked = stored[one.name];
      else one.value = stored[one.name];
    }
  } catch {
    // storage is turned off in this browser
  }
}

export function store() {
  const valueOf = (one) => (one.type === "checkbox" ? one.checked : one.value);
  const values = fields().map((one) => [one.name, valueOf(one)]);
  try {
    sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(values)));
  } catch {
    // storage is turned off in this browser
  }
}

const VIEW = "strobe.view";
let viewName = "reading";

/** The view of answers, "reading" or "tokens", which lasts beyond the tab. */
export function view() {
  try {
    viewName = localStorage.getItem(VIEW) ?? viewName;
  } catch {
    // storage is turned off in this browser
  }
  return viewName === "tokens" ? "tokens" : "reading";
}

export function setView(name) {
  viewName = name;
  try {
    localStorage.setItem(VIEW, name);
  } catch {
    // storage is turned off in this browser
  }
}

/** Speculation as the page asks for it: with the drafts that are rejected. */
export const SHOWN = { return_drafts: true };

let thinks = true; // whether the model's chat template can turn thinking on and off

/** Offer only the settings that the model's chat template reads. */
export function fitTo({ reasoning, tools: calls, variables }) {
  const reads = (name) => variables === null || variables.includes(name);
  thinks = reasoning !== null && reads("enable_thinking");
  field("thinking").closest("label").hidden = !thinks;
  field("tools").closest("label").hidden = calls === null;
}

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

/** Open the dialog at a field. */
export function openAt(name) {
  if (!dialog.open) dialog.showModal();
  field(name).focus();
}

/** Whether all settings are valid; opens the dialog at the first invalid one. */
export function valid() {
  checkTools();
  const wrong = fields().find((one) => !one.checkValidity());
  if (wrong) {
    openAt(wrong.name);
    wrong.reportValidity();
  }
  return !wrong;
}

function checkTools() {
  const text = field("tools").value.trim();
  let sentence = "";
  try {
    if (text && !Array.isArray(JSON.parse(text))) sentence = "Tools must be a JSON list: [ … ].";
  } catch (error) {
    sentence = `The tools are not JSON: ${error.message}`;
  }
  field("tools").setCustomValidity(sentence);
}

export const apiKey = () => field("key").value.trim();
export const inTurns = () => field("order").value === "turns";
export const systemMessage = () => field("system").value.trim();

export function tools() {
  const text = field("tools").value.trim();
  return text ? JSON.parse(text) : [];
}

/** The chat request's fields from the settings; empty settings are left out. */
export function request() {
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    include_speculation: true,
    speculation: field("speculation").value === "on" && SHOWN,
  };
  if (thinks) body.chat_template_kwargs = { enable_thinking: field("thinking").checked };
  const numbers = { temperature: "temperature", max_tokens: "maxTokens", seed: "seed" };
  for (const [name, from] of Object.entries(numbers)) {
    if (field(from).value !== "") body[name] = field(from).valueAsNumber;
  }
  const list = tools();
  if (list.length) body.tools = list;
  return body;
}

/** A summary of the settings for the line under the message. */
export function inEffect() {
  const words = [`speculation ${field("speculation").value}`];
  if (thinks) words.unshift(`thinking ${field("thinking").checked ? "on" : "off"}`);
  if (field("temperature").value !== "") words.push(`temperature ${field("temperature").value}`);
  if (field("maxTokens").value !== "") words.push(`at most ${field("maxTokens").value} tokens`);
  if (field("seed").value !== "") words.push(`seed ${field("seed").value}`);
  if (systemMessage()) words.push("system message");
  try {
    const names = tools().map((tool) => tool?.function?.name ?? "unnamed");
    if (names.length) words.push(`tools: ${names.join(", ")}`);
  } catch {
    words.push("tools: not JSON");
  }
  return words.join(" · ");
}
