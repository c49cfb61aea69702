// The page: its header, its sidebar and the field for messages, around the conversation.

import { Chat, keyButton, say } from "./chat.js";
import { Conversation, toMessage } from "./conversation.js";
import { button, byId, copy, element, number, showMenu } from "./dom.js";
import { DEMO, examplesFor } from "./examples.js";
import { Attachments, fileName, save } from "./files.js";
import { hide, inspect } from "./inspect.js";
import { Live } from "./live.js";
import * as settings from "./settings.js";
import { draw } from "./picture.js";
import { linkOf, runIn } from "./share.js";
import { Sidebar } from "./sidebar.js";
import { getJson, getText, ServerError } from "./stream.js";

const log = byId("log");
const prompt = byId("prompt");
const dialog = byId("settings");
const serverNote = byId("server-note");
const pageNote = byId("page-note");

let model = null; // its name, and what /server_info says about it

const chat = new Chat({
  model: async () => {
    if (model === null) await loadModel();
    return model?.name;
  },
  onChange: refresh,
  onSave: async (conversation) => {
    await sidebar.save(conversation);
    if (conversation === chat.conversation) show(conversation.id);
  },
  onShare: ({ node, answerNode: { request } }, button) => {
    const run = { prompt: node.content, files: node.files ?? [], request };
    const { path } = chat.conversation;
    const before = path
      .slice(0, path.indexOf(node))
      .map((each) => ({ role: each.role, content: toMessage(each).content }));
    const share = async (history) => {
      const copied = await copy(await linkOf(history.length ? { ...run, history } : run));
      say(copied ? "The link is copied." : "The link could not be copied.");
      button.textContent = copied ? "Copied" : "Not copied";
      setTimeout(() => (button.textContent = "Link"), 1500);
    };
    const choices = [
      ["Copy a link to this run", () => share([])],
      ["Copy it with the messages before", () => share(before)],
    ];
    if (before.length) showMenu(choices, button.getBoundingClientRect());
    else share([]);
  },
  onPicture: async ({ node, shown, results }) => {
    const answer = shown.at(-1);
    const figures = [...answer.figures.children].map(({ firstChild, lastChild }) =>
      /^\d/.test(lastChild.textContent)
        ? `${lastChild.textContent} ${firstChild.textContent}`
        : `${firstChild.textContent} ${lastChild.textContent}`,
    );
    const verdict = results.querySelector(".verdict")?.innerText;
    const picture = await draw(answer, {
      title: node?.content ?? "",
      about: byId("model").textContent,
      lines: [figures.join("   ·   "), ...(verdict ? [verdict] : [])],
    });
    save(fileName(node?.content ?? "answer", "png"), picture);
  },
  onUnreachable: (problem) => live.take({ problem }),
});

const sidebar = new Sidebar({
  onOpen: (conversation) => {
    closeDrawer();
    if (conversation.id === chat.conversation.id) return;
    chat.open(conversation);
    show(conversation.id);
    follow(true);
    focusPrompt();
  },
  onRemove: (id) => id === chat.conversation.id && newChat(),
  onChange: (conversation) => {
    if (conversation === chat.conversation && !chat.running) chat.open(conversation);
  },
});

const live = new Live(byId("live"), (problem) => {
  if (problem) tell(serverNote, problem);
  else if (model) serverNote.hidden = true;
  if (!problem) say("The server can answer again.");
  if (!problem && !model) loadModel();
});

const attachments = new Attachments(byId("attachments"), () => refresh());

// ---- messages ----

/** Send the message or compare with it; with an empty message, compare on the last prompt. */
async function submit(compare) {
  const text = prompt.value;
  const typed = text.trim() !== "" || attachments.files.length > 0;
  const again = !typed && compare && chat.turns.length > 0;
  if (chat.running) return say("Still answering. Press Escape to stop it first.");
  if (!typed && !again) return say("Type a message first.");
  if (!settings.valid()) return;
  pageNote.hidden = true;
  const files = attachments.take();
  if (typed) prompt.value = "";
  follow(true);
  focusPrompt();
  const { conversation } = chat;
  const answered = await (again ? chat.compareAgain() : chat.send(text, files, compare));
  if (!answered && typed && !prompt.value && conversation === chat.conversation) {
    prompt.value = text;
    attachments.set(files);
  }
  refresh();
  focusPrompt();
}

async function attach(files) {
  const problems = await attachments.add(files);
  if (problems.length) tellError(problems.join(" "));
  focusPrompt();
}

function newChat() {
  settings.dropAdopted();
  prompt.value = "";
  pageNote.hidden = true;
  hide();
  chat.open(new Conversation());
  show(null);
  focusPrompt();
  toTop();
}

// ---- display ----

/** Update the buttons, labels and the line under the message. */
function refresh() {
  const [call] = chat.conversation.pending;
  const running = Boolean(chat.running);
  byId("welcome").hidden = log.hasChildNodes();
  byId("stop").hidden = !running;
  byId("send").hidden = running;
  byId("compare").disabled = running;
  byId("prompt-label").classList.toggle("plain", !call);
  byId("prompt-label").textContent = call ? `Result of ${call.name}` : "Message";
  prompt.placeholder = call ? `What ${call.name} returned, as text or JSON` : "Ask something";
  byId("in-effect").textContent = settings.inEffect();
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
  else if (!dialog.open) prompt.focus({ preventScroll: true }); // the dock is always in view
}

/** Show one of the notes above the conversation. */
function tell(note, ...parts) {
  note.replaceChildren(...parts);
  note.hidden = false;
}

/** Tell a problem of the page until the next message. */
function tellError(text) {
  pageNote.className = "error";
  tell(pageNote, text);
}

let pinned = true; // whether the page is scrolled to the end and stays there
let lastTop = 0;

/** Scroll to the top, again once the new layout stands: Firefox moves on by a pixel before that. */
function toTop() {
  scrollTo(0, 0);
  requestAnimationFrame(() => requestAnimationFrame(() => scrollTo(0, 0)));
}

const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);
new ResizeObserver(() => pinned && log.hasChildNodes() && toEnd()).observe(log);

function follow(end) {
  pinned = end;
  if (end) toEnd();
}

/** Show all answers in the view of this name. */
function showView(name) {
  settings.setView(name);
  document.body.dataset.view = name;
  for (const one of byId("views").children) {
    one.setAttribute("aria-pressed", String(one.value === name));
  }
  hide();
  chat.show(name);
}

/** Remember the shown conversation in the page's address. */
function show(id) {
  history.replaceState(null, "", id ? `#${id}` : location.pathname + location.search);
  sidebar.mark(id);
}

const narrow = matchMedia("(max-width: 68rem)");

/** Open or close the sidebar. A wide page remembers it. */
function openSidebar(open) {
  byId("sidebar").hidden = !open;
  byId("open-sidebar").setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("with-sidebar", open);
  if (!narrow.matches) settings.remember("sidebar", open ? "" : "closed");
  if (open && narrow.matches) byId("search").focus();
}

/** Close the sidebar where it covers the conversation. */
function closeDrawer() {
  if (narrow.matches && !byId("sidebar").hidden) openSidebar(false);
}

// ---- the server ----

async function loadModel() {
  try {
    const info = await getJson("server_info", settings.apiKey());
    model = { name: info.server.served_model_name[0], ...info };
    serverNote.hidden = true;
  } catch (error) {
    model = null;
    const text = error instanceof ServerError ? error.message : "The server names no model.";
    if (error.unreachable) live.take({ problem: text });
    else tell(serverNote, text, " ", ...(error.status === 401 ? [keyButton()] : []));
  }
  const context = model && `context ${number(model.engine.max_model_len)}`;
  byId("model").textContent = model ? `${model.name} · Strobe ${model.version} · ${context}` : "";
  document.title = model ? `${model.name} · Strobe` : "Strobe";
  byId("examples").hidden = !model;
  byId("demo-note").hidden = model?.name !== DEMO;
  byId("shadow").hidden = !model?.config.shadow;
  byId("verify-note").hidden = !model?.config.target;
  byId("verify-note").querySelector("code").textContent = model ? verifyCommand(model.config) : "";
  if (model) offerExamples();
  if (model) settings.fitTo(model);
  refresh();
}

/** Return the command that verifies the server's models. */
function verifyCommand({ target, draft }) {
  return ["strobe verify", target, draft].filter(Boolean).map(quoted).join(" ");
}

/** Quote a name for a shell where it needs that. */
function quoted(name, index) {
  return index === 0 || /^[\w./:@+-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`;
}

/** Show what drafters would bring, in shadow mode. */
async function showShadow() {
  const panel = byId("shadow");
  if (!panel.open) return;
  const report = panel.querySelector("pre");
  try {
    report.textContent = await getText("shadow", settings.apiKey());
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    report.textContent = error.message;
  }
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

/** Show what the address names: a stored conversation, or a run that is ready to be sent. */
async function openAddress() {
  const linked = sidebar.find(location.hash.slice(1));
  if (linked && linked !== chat.conversation) {
    chat.open(linked);
    sidebar.mark(linked.id);
  }
  try {
    const run = await runIn(location.hash);
    if (run) prepare(run);
  } catch {
    tellError("The link holds no run that can be read; ask for it again.");
  }
}

/** Fill in a run of a link: its settings apply until the page is left. */
function prepare({ prompt: text, files = [], request, history = [] }) {
  const conversation = new Conversation();
  for (const { role, content } of history) conversation.add({ role, content });
  chat.open(conversation);
  settings.adoptRequest(request);
  attachments.set(files);
  prompt.value = text;
  show(null);
  refresh();
  pageNote.className = "notice";
  tell(pageNote, `This link has set the message and the settings, with seed ${request.seed}. Send runs it.`);
}

// ---- event listeners ----

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(false);
});
byId("compare").addEventListener("click", () => submit(true));
byId("shadow").addEventListener("toggle", showShadow);
byId("stop").addEventListener("click", () => chat.stop());
byId("new-chat").addEventListener("click", newChat);
byId("views").addEventListener("click", ({ target }) => target.value && showView(target.value));
byId("open-settings").addEventListener("click", () => dialog.showModal());
byId("open-sidebar").addEventListener("click", () => openSidebar(byId("sidebar").hidden));
byId("column").addEventListener("click", closeDrawer, { capture: true });
byId("close-sidebar").addEventListener("click", () => openSidebar(false));
byId("options").addEventListener("input", () => {
  settings.store();
  refresh();
});
byId("options").elements.namedItem("key").addEventListener("change", () => {
  loadModel();
  live.start(settings.apiKey());
});

byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", async ({ target }) => {
  await attach([...target.files]);
  target.value = "";
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
prompt.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length) return;
  event.preventDefault();
  attach(files);
});

prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(false);
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || dialog.open) return;
  if (narrow.matches && !byId("sidebar").hidden) return closeDrawer();
  hide();
  chat.stop();
});
addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  // Only the reader scrolls up; new text may also move the end away.
  if (scrollHeight - scrollTop - clientHeight < 80) pinned = true;
  else if (scrollTop < lastTop) pinned = false;
  lastTop = scrollTop;
});
document.addEventListener("visibilitychange", () => document.hidden || sidebar.load());
for (const kind of ["error", "unhandledrejection"]) {
  addEventListener(kind, ({ reason, message }) => {
    tellError(`The page failed: ${reason?.message ?? message}. Reload it to go on.`);
  });
}

settings.restore();
showView(settings.view());
openSidebar(!narrow.matches && settings.recall("sidebar") !== "closed");
narrow.addEventListener("change", ({ matches }) => matches && openSidebar(false));
inspect(log);
refresh();
focusPrompt();
loadModel();
live.start(settings.apiKey());
await sidebar.start();
await openAddress();
addEventListener("hashchange", openAddress);
