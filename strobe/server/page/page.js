// The chat: the conversation, sending, stopping, comparing.

import { Answer } from "./answer.js";
import { ROUNDS, verdict } from "./compare.js";
import { byId, button, element, number } from "./dom.js";
import { DEMO, examplesFor } from "./examples.js";
import { hide, inspect } from "./inspect.js";
import * as settings from "./settings.js";
import { chat, getJson, postJson, ServerError } from "./stream.js";

const log = byId("log");
const prompt = byId("prompt");
const dialog = byId("settings");

let model = null; // its name, and what /server_info says about it
let running = null; // the AbortController of the current stream
let talk = newTalk();

/** messages: the conversation without the system message. pending: calls without a result. */
function newTalk() {
  return { messages: [], pending: [] };
}

// ---- sending ----

/** Send the message or compare with it; with an empty message, compare on the last prompt. */
async function submit(compare) {
  const text = prompt.value;
  const typed = text.trim() !== "";
  const again = !typed && compare && talk.messages.length > 0;
  if (running) return say("Still answering. Press Escape to stop it first.");
  if (!typed && !again) return say("Type a message first.");
  if (!settings.valid()) return;
  for (const failed of log.querySelectorAll(".turn.failed")) failed.remove();

  const before = { ...talk, messages: [...talk.messages] };
  if (again) {
    const isPrompt = ({ role }) => role !== "assistant";
    talk.messages.length = talk.messages.findLastIndex(isPrompt) + 1;
  } else {
    talk.messages.push(messageOf(text));
    prompt.value = "";
  }
  focusPrompt();
  const turn = addTurn(again ? null : talk.messages.at(-1));
  const mine = talk;
  if (!mine.pending.length) {
    const answered = await converse(turn, compare);
    if (talk === mine && !answered) {
      Object.assign(mine, before);
      turn.classList.add("failed");
      if (!prompt.value && typed) prompt.value = text;
    }
  }
  refresh();
  focusPrompt();
}

/** The typed text as a message: a tool's result while a call waits for one. */
function messageOf(text) {
  if (!talk.pending.length) return { role: "user", content: text };
  const [call, ...rest] = talk.pending;
  talk.pending = rest;
  return { role: "tool", tool_call_id: call.id, name: call.name, content: text };
}

/** Stream one answer, or two, into a turn. Returns whether the conversation has a new message. */
async function converse(turn, compare) {
  const mine = talk;
  running = new AbortController();
  const { signal } = running;
  refresh();
  say("Answering …");
  if (model === null) await loadModel();
  const system = settings.systemMessage();
  const body = {
    model: model?.name,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...mine.messages],
    ...settings.request(),
  };
  const answer = compare
    ? await both(turn, body, signal)
    : await stream(addAnswer(turn, "Answer"), body, signal);
  running = null;
  if (!answer.numTokens) return false;
  mine.messages.push(answer.message);
  mine.pending = answer.message.tool_calls ? [...answer.calls] : [];
  return true;
}

/** Run a request without and with speculation, ROUNDS times, and show the first round. Returns the
 * answer with speculation. */
async function both(turn, body, signal) {
  body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  const off = addAnswer(turn, "Speculation off");
  const on = addAnswer(turn, "Speculation on");
  turn.classList.add("compared");
  const first = () => stream(off, { ...body, speculation: false }, signal);
  const second = () => stream(on, { ...body, speculation: settings.SHOWN }, signal);
  if (settings.inTurns()) {
    on.element.classList.add("waiting");
    await first();
    on.element.classList.remove("waiting");
    if (off.failed) on.finish("Not run, because the other one did not end.");
    else await second();
  } else {
    await Promise.all([first(), second()]);
  }
  const rounds = [{ off, on }];
  const note = element("p", { class: "note" });
  turn.append(note);
  while (rounds.length < ROUNDS && !off.failed && !on.failed && on.report?.used) {
    note.textContent = `Measuring again: run ${rounds.length + 1} of ${ROUNDS} …`;
    say(note.textContent);
    const round = await unseen(body, signal);
    if (round.off.failed || round.on.failed) break;
    rounds.push(round);
  }
  note.remove();
  const result = verdict(off, on, rounds, body, settings.inTurns());
  turn.append(result);
  say(result.textContent);
  return on;
}

/** Run another round of a comparison without showing its answers. */
async function unseen(body, signal) {
  const round = { off: makeAnswer("Speculation off"), on: makeAnswer("Speculation on") };
  const first = () => stream(round.off, { ...body, speculation: false }, signal, true);
  const second = () => stream(round.on, { ...body, speculation: settings.SHOWN }, signal, true);
  if (settings.inTurns()) {
    await first();
    if (!round.off.failed) await second();
  } else {
    await Promise.all([first(), second()]);
  }
  return round;
}

async function stream(answer, body, signal, silent = false) {
  answer.times.started = performance.now();
  try {
    for await (const { chunk, time } of chat(body, settings.apiKey(), signal)) {
      answer.feed(chunk, time);
      if (!silent) paint(answer);
    }
    await answer.finish();
    if (!silent) say(`${answer.content || "The answer has no text."} ${number(answer.numTokens)} tokens.`);
  } catch (error) {
    answer.failed = true;
    if (signal.aborted) {
      await answer.finish("Stopped.");
      say("Stopped.");
    } else {
      const known = error instanceof ServerError;
      await answer.finish(known ? error.message : `The page failed: ${error.message}`, "error");
      if (error.status === 401) answer.notes.append(keyButton());
      if (!known) console.error(error);
    }
  }
  return answer;
}

// ---- display ----

function addTurn(message) {
  const turn = element("article", { class: "turn" });
  if (message === null) {
    turn.append(element("p", { class: "note" }, "The same prompt, compared."));
  } else {
    const author = message.role === "tool" ? `Result of ${message.name}` : "You";
    const block = element("div", { class: `message ${message.role}` });
    block.append(element("h2", {}, author), element("p", {}, message.content));
    turn.append(block);
  }
  turn.append(element("div", { class: "answers" }));
  log.append(turn);
  pinned = true;
  return turn;
}

function addAnswer(turn, title) {
  const answer = makeAnswer(title);
  turn.querySelector(".answers").append(answer.element);
  shown.add(answer);
  return answer;
}

function makeAnswer(title) {
  return new Answer(title, settings.view(), parseMarkdown);
}

async function parseMarkdown(text, open) {
  return (await postJson("markdown", { text, open }, settings.apiKey())).blocks;
}

const keyButton = () => button("Enter the API key", () => settings.openAt("key"));

/** Update the buttons, labels and the line under the message. */
function refresh() {
  const [call] = talk.pending;
  byId("welcome").hidden = log.hasChildNodes();
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
  byId("compare").disabled = Boolean(running);
  byId("prompt-label").classList.toggle("plain", !call);
  byId("prompt-label").textContent = call ? `Result of ${call.name}` : "Message";
  prompt.placeholder = call ? `What ${call.name} returned, as text or JSON` : "Ask something";
  byId("in-effect").textContent = settings.inEffect();
  log.setAttribute("aria-busy", String(Boolean(running)));
  fit();
}

/** Fit the field's height to its text, up to the style's maximum. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + prompt.offsetHeight - prompt.clientHeight}px`;
}

let touched = false; // whether the last press was by touch
addEventListener("pointerdown", ({ pointerType }) => (touched = pointerType === "touch"));

/** Focus the field, except after a touch, when a keyboard would cover the answer. */
function focusPrompt() {
  if (touched) prompt.blur();
  else if (!dialog.open) prompt.focus();
}

/** Announce a text to screen readers. */
function say(text) {
  byId("status").textContent = text;
}

let frame = null;
const changed = new Set();

/** Bring an answer up to date with the next frame. */
function paint(answer) {
  changed.add(answer);
  frame ??= requestAnimationFrame(() => {
    frame = null;
    for (const one of changed) one.paint();
    changed.clear();
  });
}

let pinned = true; // whether the page is scrolled to the end and stays there
let lastTop = 0;
new ResizeObserver(() => pinned && scrollTo(0, document.documentElement.scrollHeight)).observe(log);

const shown = new Set(); // the answers on the page

/** Show all answers in the view of this name. */
function showView(name) {
  settings.setView(name);
  document.body.dataset.view = name;
  for (const one of byId("views").children) {
    one.setAttribute("aria-pressed", String(one.value === name));
  }
  hide();
  for (const answer of shown) answer.show(name);
}

// ---- the server ----

async function loadModel() {
  const note = byId("server-note");
  try {
    const info = await getJson("server_info", settings.apiKey());
    model = { name: info.server.served_model_name[0], ...info };
    note.hidden = true;
  } catch (error) {
    model = null;
    const text = error instanceof ServerError ? error.message : "The server names no model.";
    note.replaceChildren(text, " ", ...(error.status === 401 ? [keyButton()] : []));
    note.hidden = false;
    if (error.status === 503) setTimeout(loadModel, 400); // it is still starting
  }
  const context = model && `context ${number(model.engine.max_model_len)}`;
  byId("model").textContent = model ? `${model.name} · Strobe ${model.version} · ${context}` : "";
  document.title = model ? `${model.name} · Strobe` : "Strobe";
  byId("examples").hidden = !model;
  byId("demo-note").hidden = model?.name !== DEMO;
  if (model) offerExamples();
  if (model) settings.fitTo(model.template);
  refresh();
}

/** Show the examples that suit the model. */
function offerExamples() {
  const list = byId("examples").querySelector("ul");
  list.replaceChildren();
  for (const example of examplesFor(model.name)) {
    const choose = button(element("b", {}, example.name), () => {
      settings.adopt(example);
      prompt.value = example.prompt;
      refresh();
      focusPrompt();
    });
    choose.append(example.prompt);
    list.append(element("li", {}, choose));
  }
}

// ---- event listeners ----

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(false);
});
byId("compare").addEventListener("click", () => submit(true));
byId("stop").addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", () => {
  running?.abort();
  talk = newTalk();
  settings.dropAdopted();
  log.replaceChildren();
  shown.clear();
  prompt.value = "";
  hide();
  refresh();
  scrollTo(0, 0);
  focusPrompt();
});
byId("views").addEventListener("click", ({ target }) => target.value && showView(target.value));
byId("open-settings").addEventListener("click", () => dialog.showModal());
byId("options").addEventListener("input", () => {
  settings.store();
  refresh();
});
byId("options").elements.namedItem("key").addEventListener("change", loadModel);

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(false);
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || dialog.open) return;
  hide();
  running?.abort();
});
addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  // Only the reader scrolls up; new text may also move the end away.
  if (scrollHeight - scrollTop - clientHeight < 80) pinned = true;
  else if (scrollTop < lastTop) pinned = false;
  lastTop = scrollTop;
});

settings.restore();
showView(settings.view());
inspect(log);
refresh();
loadModel();
