// The list of conversations: search, rename, delete, export, import.

import { Conversation, fromJson, fromMarkdown, toMarkdown } from "./conversation.js";
import { button, byId, counted, element, showMenu } from "./dom.js";
import { fileName, save } from "./files.js";
import * as store from "./store.js";

const list = byId("conversations");
const search = byId("search");
const note = byId("sidebar-note");

export class Sidebar {
  /** onOpen: called with a conversation that was chosen; onRemove: with the id of one removed;
   * onChange: with one that another page has changed. */
  constructor({ onOpen, onRemove, onChange }) {
    Object.assign(this, { onOpen, onRemove, onChange });
    this.current = null; // the id of the shown conversation
    this.conversations = []; // the newest first
    this.saves = 0; // so many so far
    search.addEventListener("input", () => this.show());
    byId("export-all").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("change", ({ target }) => this.import(target));
  }

  async start() {
    if (!(await store.kept)) tell("This browser keeps no conversations beyond this page.");
    await this.load();
    store.onChange(() => this.load());
  }

  /** Read the conversations that other pages may have changed. */
  async load() {
    let records, saves;
    do {
      saves = this.saves;
      records = await store.all();
    } while (saves !== this.saves); // what was saved meanwhile may be missing
    const changed = [];
    this.conversations = records.map((record) => {
      const known = this.find(record.id);
      if (known?.merge(record)) changed.push(known);
      return known ?? new Conversation(record);
    });
    if (!list.querySelector("input")) this.show(); // nobody is renaming one
    for (const conversation of changed) this.onChange(conversation);
  }

  async save(conversation) {
    conversation.edited = Date.now();
    const others = this.conversations.filter(({ id }) => id !== conversation.id);
    this.conversations = [...others, conversation].sort((a, b) => b.updated - a.updated);
    this.saves += 1;
    const stored = await store.get(conversation.id);
    if (stored) conversation.merge(stored); // messages from another page
    await store.put(conversation.record);
    this.show();
  }

  /** The stored conversation of an id, if there is one. */
  find(id) {
    return this.conversations.find((conversation) => conversation.id === id);
  }

  /** Mark the conversation that is shown. */
  mark(id) {
    this.current = id;
    this.show();
  }

  show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.conversations.filter((conversation) => {
      const text = words.length ? conversation.text.toLowerCase() : "";
      return words.every((word) => text.includes(word));
    });
    const groups = Map.groupBy(found, ({ pinned, updated }) => (pinned ? PINNED : dayOf(updated)));
    const days = [...groups.keys()].filter((name) => name !== PINNED);
    const names = groups.has(PINNED) ? [PINNED, ...days] : days;
    list.replaceChildren(
      ...names.map((name) =>
        element(
          "li",
          {},
          element("h2", {}, name),
          element("ul", {}, ...groups.get(name).map((conversation) => this.item(conversation))),
        ),
      ),
    );
    const none = words.length ? "No conversation has these words." : "Conversations appear here.";
    byId("no-conversations").textContent = found.length ? "" : none;
    byId("export-all").disabled = !this.conversations.length;
  }

  item(conversation) {
    const { id, title } = conversation;
    const open = button(title, () => this.onOpen(this.find(id)), {
      class: "quiet",
      "aria-current": id === this.current && "true",
    });
    const more = button("⋯", () => this.offer(conversation, item, more), {
      class: "quiet more",
      "aria-label": `More on ${title}`,
      "aria-haspopup": "true",
    });
    const item = element("li", {}, open, more);
    return item;
  }

  offer(conversation, item, opener) {
    const { title, pinned } = conversation;
    const choices = [
      [
        pinned ? "Unpin" : "Pin",
        () => this.save(Object.assign(conversation, { pinned: !pinned })),
      ],
      ["Rename", () => this.rename(conversation, item)],
      [
        "Export as Markdown",
        () => save(fileName(title, "md"), toMarkdown(conversation), "text/markdown"),
      ],
      [
        "Export as JSON",
        () => save(fileName(title, "json"), asJson([conversation]), "application/json"),
      ],
      ["Delete", () => this.remove(conversation)],
    ];
    showMenu(choices, opener.getBoundingClientRect());
  }

  rename(conversation, item) {
    const field = element("input", { "aria-label": "Title", maxlength: 200 });
    field.value = conversation.title;
    let done = false;
    const end = async (title) => {
      if (done) return;
      done = true;
      if (title) await this.save(Object.assign(conversation, { title }));
      else this.show();
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(field.value.trim());
      if (event.key === "Escape") end("");
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    item.replaceChildren(field);
    field.select();
  }

  async remove(conversation) {
    await store.remove(conversation.id);
    this.onRemove(conversation.id);
    await this.load();
    const undo = button("Undo", async () => {
      note.hidden = true;
      await this.save(conversation);
    });
    tell(`Deleted “${conversation.title}”. `, undo);
    undo.focus();
  }

  exportAll() {
    save("strobe-conversations.json", asJson(this.conversations), "application/json");
  }

  async import(field) {
    let count = 0;
    const problems = [];
    for (const file of field.files) {
      try {
        const text = await file.text();
        const isJson = /\.json$/i.test(file.name);
        for (const conversation of isJson ? fromJson(text) : [fromMarkdown(text)]) {
          await store.put(conversation.record);
          count += 1;
        }
      } catch (error) {
        problems.push(`${file.name} cannot be imported: ${error.message}.`);
      }
    }
    field.value = "";
    await this.load();
    tell([...problems, count && `Imported ${counted(count, "conversation")}.`].filter(Boolean).join(" "));
  }
}

const PINNED = "Pinned";
const DAY = { weekday: "long" };
const DATE = { day: "numeric", month: "long" };
const YEAR = { month: "long", year: "numeric" };

/** The day of a time in milliseconds, as the list names it: the longer ago, the coarser. */
export function dayOf(time, now = Date.now()) {
  const midnight = (at) => new Date(at).setHours(0, 0, 0, 0);
  const days = Math.round((midnight(now) - midnight(time)) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  const form = days < 7 ? DAY : days < 31 ? DATE : YEAR;
  return new Date(time).toLocaleDateString("en-GB", form);
}

function asJson(conversations) {
  const records = conversations.map(({ record }) => record);
  return JSON.stringify({ strobe: 1, conversations: records }, null, 1);
}

function tell(...parts) {
  note.replaceChildren(...parts);
  note.hidden = false;
}
