// A conversation as data: a tree of messages, of which one path is shown.
//
//   node: {id, parent, role: "user" | "tool" | "assistant", content, …}
//     user       files: [{name, text}]
//     tool       call: {id, name}, whose result it is
//     assistant  calls, and record: what `Answer.record` returns; race: of a comparison

/** A random name that works without HTTPS, too. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((n) => n.toString(36)).join("");
}

export class Conversation {
  constructor({ id, title, created, updated, edited, pinned, leaf, nodes } = {}) {
    this.id = id ?? randomId();
    this.title = title ?? "";
    this.created = created ?? Date.now();
    this.updated = updated ?? this.created; // when its last message was added
    this.edited = edited ?? this.updated; // when it was last changed in any way
    this.pinned = pinned ?? false;
    this.leaf = leaf ?? null;
    this.nodes = new Map((nodes ?? []).map((node) => [node.id, node]));
  }

  /** The conversation as plain data. */
  get record() {
    const { id, title, created, updated, edited, pinned, leaf } = this;
    return { id, title, created, updated, edited, pinned, leaf, nodes: [...this.nodes.values()] };
  }

  /** Take over what another page has stored of this conversation: its messages, and the rest if it
   * is newer. Returns whether it is. */
  merge(record) {
    for (const node of record.nodes) if (!this.nodes.has(node.id)) this.nodes.set(node.id, node);
    const newer = (record.edited ?? record.updated) > this.edited;
    if (newer) {
      const { title, updated, edited = updated, pinned = false, leaf } = record;
      Object.assign(this, { title, updated, edited, pinned, leaf });
      for (const node of record.nodes) this.nodes.set(node.id, node);
    }
    return newer;
  }

  /** The nodes from the first message to the shown end. */
  get path() {
    const path = [];
    for (let node = this.nodes.get(this.leaf); node; node = this.nodes.get(node.parent)) {
      path.unshift(node);
    }
    return path;
  }

  /** Calls of the last answer that wait for their results. */
  get pending() {
    const { path } = this;
    const at = path.findLastIndex(({ role }) => role === "assistant");
    if (path.slice(at + 1).some(({ role }) => role === "user")) return [];
    return (path[at]?.calls ?? []).slice(path.length - 1 - at);
  }

  /** Add a message at the end. */
  add(fields) {
    const node = { id: randomId(), parent: this.leaf, ...fields };
    this.nodes.set(node.id, node);
    this.leaf = node.id;
    if (!this.title && node.role === "user") this.title = titleOf(node);
    this.updated = Date.now();
    return node;
  }

  /** Remove the last message. */
  remove(node) {
    this.nodes.delete(node.id);
    if (this.leaf === node.id) this.leaf = node.parent;
  }

  /** Versions of a message: the nodes with the same parent. */
  versions(node) {
    return [...this.nodes.values()].filter(({ parent }) => parent === node.parent);
  }

  /** Show a version of a message, with the newest messages after it. */
  choose(node) {
    for (let next = node; next; ) {
      this.leaf = next.id;
      next = [...this.nodes.values()].findLast(({ parent }) => parent === this.leaf);
    }
  }

  /** The messages of the path as the API takes them. */
  get messages() {
    return this.path.map(toMessage);
  }

  /** All text, to search in. */
  get text() {
    return [this.title, ...[...this.nodes.values()].map(({ content }) => content)].join("\n");
  }
}

function titleOf({ content, files = [] }) {
  const words = content.trim().replace(/\s+/g, " ") || files.map(({ name }) => name).join(", ");
  return words.length > 60 ? `${words.slice(0, 59).trimEnd()}…` : words;
}

/** A message as the API takes it, files among its text. */
export function toMessage({ role, content, files = [], call, calls = [] }) {
  if (role === "tool") return { role, tool_call_id: call.id, name: call.name, content };
  const message = { role, content };
  if (files.length) message.content = [...files.map(quoted), content].join("\n\n").trim();
  if (calls.length) {
    message.tool_calls = calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return message;
}

/** A file as text: its name, and its content between fences longer than any in it. */
function quoted({ name, text }) {
  const runs = [...text.matchAll(/`{3,}/g)].map(([run]) => run.length);
  const fence = "`".repeat(Math.max(2, ...runs) + 1);
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

// ---- files ----

const HEADS = { user: "You", assistant: "Assistant" };
const HEAD = /^## (You|Assistant|Result of (\S+))$/;

/** The path as a Markdown text. */
export function toMarkdown(conversation) {
  const parts = conversation.path.map((node) => {
    const head = HEADS[node.role] ?? `Result of ${node.call.name}`;
    const lines = toMessage(node).content.split("\n");
    return `## ${head}\n\n${lines.map((line) => (HEAD.test(line) ? `\\${line}` : line)).join("\n")}`;
  });
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}

/** Read what `toMarkdown` wrote. Throws an Error with a sentence. */
export function fromMarkdown(text) {
  const conversation = new Conversation();
  const lines = text.split(/\r?\n/);
  let node = null;
  for (const line of lines) {
    const head = HEAD.exec(line);
    if (head) {
      const role = { You: "user", Assistant: "assistant" }[head[1]] ?? "tool";
      const call = conversation.pending[0] ?? { id: randomId(), name: head[2] };
      node = conversation.add({ role, content: "", ...(role === "tool" && { call }) });
    } else if (node) {
      node.content += `${line.replace(/^\\(?=## )/, "")}\n`;
    }
  }
  if (!node) throw new Error("it has no heading “## You” or “## Assistant”");
  for (const each of conversation.nodes.values()) each.content = each.content.trim();
  const first = [...conversation.nodes.values()].find(({ role }) => role === "user");
  const title = /^# (.+)$/.exec(lines[0])?.[1];
  conversation.title = title ?? (first ? titleOf(first) : "Imported");
  return conversation;
}

/** Read conversations that were exported as JSON. Throws an Error with a sentence. */
export function fromJson(text) {
  const { conversations } = JSON.parse(text);
  if (!Array.isArray(conversations)) throw new Error("it has no list “conversations”");
  return conversations.map((record) => {
    const nodes = record?.nodes;
    const valid = (node) => typeof node?.id === "string" && typeof node.content === "string";
    if (!Array.isArray(nodes) || !nodes.every(valid)) throw new Error("a conversation has no nodes");
    return new Conversation({ ...record, title: String(record.title ?? "Imported") });
  });
}
