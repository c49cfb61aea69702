// The settings, in the dialog and in the tab's session storage, and the request they make.

import { byId } from "./dom.js";

const STORED = "strobe.settings";
const form = byId("options");
const dialog = byId("settings");
const fields = () => [...form.elements].filter((field) => field.name);
const field = (name) => form.elements.namedItem(name);

/** Settings live as long as the tab; without storage, as long as the page. */
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

let adopted = ""; // the tools an example has put into the field

/** Take the thinking switch and the tools of an example; tools of one's own stay. */
export function adopt({ thinking, tools }) {
  dropAdopted();
  field("thinking").checked = thinking;
  if (tools) field("tools").value = adopted = JSON.stringify(tools, null, 1);
  store();
}

/** Take away the tools that an example brought, if they are as it brought them. */
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

/** Whether all settings can be sent; opens the dialog at the first that cannot. */
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

/** The fields of a chat request that the settings decide; an empty setting sends nothing. */
export function request() {
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    include_speculation: true,
    speculation: field("speculation").value === "on",
    chat_template_kwargs: { enable_thinking: field("thinking").checked },
  };
  const numbers = { temperature: "temperature", max_tokens: "maxTokens", seed: "seed" };
  for (const [name, from] of Object.entries(numbers)) {
    if (field(from).value !== "") body[name] = field(from).valueAsNumber;
  }
  const given = tools();
  if (given.length) body.tools = given;
  return body;
}

/** What is set, in a few words for the line under the message. */
export function inEffect() {
  const words = [
    `thinking ${field("thinking").checked ? "on" : "off"}`,
    `speculation ${field("speculation").value}`,
  ];
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
