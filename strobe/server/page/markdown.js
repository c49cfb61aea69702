// Markdown as plain data, of which prose.js builds elements. markdown-it parses it; it is loaded
// with the first answer to read.
//
// Nothing here writes HTML, and HTML in a text stays text. A node is a string, or a list: a tag, its
// attributes, then its children, which are nodes.

import { highlight } from "./code.js";
import { addFormulas, cutOpenFormula, mask } from "./tex.js";

const TAGS = {
  paragraph: "p",
  bullet_list: "ul",
  ordered_list: "ol",
  blockquote: "blockquote",
  hr: "hr",
  table: "table",
  thead: "thead",
  tbody: "tbody",
  tr: "tr",
  th: "th",
  td: "td",
  strong: "strong",
  em: "em",
  s: "del",
  softbreak: "br",
  hardbreak: "br",
};
const LINK = /^(https?:\/\/|mailto:)/i;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
/** A line that may become a rule, a heading, a list, a task or a table, or the mark of one. */
const MARKERS_ONLY = /^[\s\-=*_+#>|:`~]*(\d{1,9}[.)]?)?[ \t]*(\[([ xX](\][ \t]*[*~`![<\\$]*)?)?)?$/;
const TASK = /^\[([ xX])\][ \t]+/;
const TABLE_RULE = /^[\s|:-]*-[\s|:-]*\n$/;
const OPEN_LINK = /!?\[([^[\]]*)(\]\(?[^()\s]*)?\n?$/;
const EMPHASIS = /(?<![\p{L}\p{N}_*])\*(?=\S)|(?<=[^\s*])\*(?![\p{L}\p{N}_*])/gu;
const MAX_LINK = 4000; // characters of a link that is cut while it is open

let parser = null; // a promise of it

/** Load markdown-it. Returns a promise of `blocks` with it. */
export async function loadParser() {
  parser ??= import("./markdown-it.js").then(makeParser);
  try {
    const loaded = await parser;
    return (text, open) => blocks(loaded, text, open);
  } catch (error) {
    parser = null; // the next answer tries again
    throw error;
  }
}

function makeParser() {
  const made = globalThis.markdownit("commonmark", { html: false, breaks: true });
  made.disable(["html_block", "html_inline"]);
  addFormulas(made);
  return made.enable(["table", "strikethrough"]);
}

/** The blocks of a text, as {line, node}: a block's first line, from 0. open: the text goes on, so
 * that its end is shown as it will probably be. */
function blocks(loaded, text, open) {
  return tree(loaded.parse(open ? close(text) : text, {})).flatMap((branch) =>
    nodes(branch).map((node) => ({ line: branch.token.map?.[0] ?? 0, node })),
  );
}

/** A text that goes on, without a last line that may become a marker, and with its open code,
 * emphasis and links closed. */
export function close(text) {
  const head = text.slice(0, text.lastIndexOf("\n") + 1);
  const last = text.slice(head.length);
  if (FENCE.test(last) || MARKERS_ONLY.test(last)) text = head;
  const { inCode, afterCode } = fences(text);
  if (inCode) return text;
  text = text.slice(0, afterCode) + cutOpenFormula(text.slice(afterCode));
  const gap = text.lastIndexOf("\n\n");
  const start = Math.max(afterCode, gap < 0 ? 0 : gap + 2);
  const paragraph = text.slice(start);
  const isTable = lines(paragraph).some((row) => TABLE_RULE.test(row));
  // A table begins with its second row.
  if (paragraph.trimStart().startsWith("|") && !isTable) return text.slice(0, start);
  return text.slice(0, start) + closeInline(paragraph);
}

/** The lines of a text, with their line breaks. */
const lines = (text) => text.split(/(?<=\n)/);

/** Whether a text ends in a block of code between fences, and where its last closed one ends. */
function fences(text) {
  let fence = "";
  let afterCode = 0;
  let position = 0;
  for (const line of lines(text)) {
    position += line.length;
    const mark = FENCE.exec(line)?.[1];
    if (!mark) continue;
    if (!fence) {
      fence = mark;
    } else if (mark.startsWith(fence) && line.trim() === fence[0].repeat(line.trim().length)) {
      fence = "";
      afterCode = position;
    }
  }
  return { inCode: fence !== "", afterCode };
}

function closeInline(text) {
  text = withoutEnd(text, "*~`![<\\"); // they may open or close something
  if (count(text, "`") % 2) return text + "`";
  let prose = mask(text);
  const from = Math.max(0, prose.length - MAX_LINK);
  const link = OPEN_LINK.exec(prose.slice(from));
  if (link) {
    text = text.slice(0, from + link.index) + link[1];
    prose = prose.slice(0, from + link.index) + link[1];
  }
  let ends = "";
  for (const mark of ["~~", "**"]) {
    if (count(prose, mark) % 2) ends = mark + ends;
    prose = prose.replaceAll(mark, "  ");
  }
  if ((prose.match(EMPHASIS) ?? []).length % 2) ends = "*" + ends;
  return ends ? text.trimEnd() + ends : text;
}

function withoutEnd(text, marks) {
  let end = text.length;
  while (end > 0 && marks.includes(text[end - 1])) end--;
  return text.slice(0, end);
}

const count = (text, mark) => text.split(mark).length - 1;

/** The tree of markdown-it's list of tokens, as {token, children}. */
function tree(tokens) {
  const root = { children: [] };
  const open = [root];
  for (const token of tokens) {
    if (token.nesting < 0) {
      open.pop();
      continue;
    }
    const branch = { token, children: tree(token.children ?? []) };
    open.at(-1).children.push(branch);
    if (token.nesting > 0) open.push(branch);
  }
  return root.children;
}

/** A branch's nodes: several for one without a tag of its own. */
function nodes({ token, children }) {
  const { content, hidden, meta, tag } = token;
  const type = token.type.replace(/_open$/, "");
  switch (type) {
    case "text":
      return content ? [content] : [];
    case "code_inline":
      return [["code", {}, content]];
    case "fence":
    case "code_block": {
      const language = token.info.trim().split(/\s/)[0];
      const code = content.replace(/\n$/, "");
      return [["pre", { language }, ...highlight(code, language)]];
    }
    case "formula":
      return [["math", { display: meta.display }, content]];
    case "list_item":
      return [listItem(children.flatMap(nodes))];
    case "image": { // a link, since the page loads nothing from elsewhere
      const address = token.attrGet("src");
      return link(address, [content || address]);
    }
    case "link":
      return link(token.attrGet("href"), children.flatMap(nodes));
    case "heading": // under the page's own headings
      return [[`h${Math.min(Number(tag[1]) + 2, 6)}`, {}, ...children.flatMap(nodes)]];
  }
  const inner = children.flatMap(nodes);
  return type in TAGS && !hidden ? [[TAGS[type], attributes(token, type), ...inner]] : inner;
}

/** A list's item; [ ] or [x] at its beginning makes it a task with a box. */
function listItem(children) {
  const first = children[0] ?? "";
  const isParagraph = typeof first !== "string" && first[0] === "p" && first.length > 2;
  const text = isParagraph ? first[2] : first;
  const task = typeof text === "string" ? TASK.exec(text) : null;
  if (!task) return ["li", {}, ...children];
  const rest = text.length > task[0].length ? [text.slice(task[0].length)] : [];
  const begin = isParagraph ? [["p", {}, ...rest, ...first.slice(3)]] : rest;
  const box = ["input", { checked: task[1] !== " " }];
  return ["li", { class: "task" }, box, ...begin, ...children.slice(1)];
}

function attributes(token, type) {
  const start = type === "ordered_list" ? token.attrGet("start") : null;
  const style = token.attrGet("style");
  return {
    ...(start !== null && { start }),
    ...(style !== null && { class: style.replace("text-align:", "") }),
  };
}

const link = (address, children) =>
  LINK.test(address) ? [["a", { href: address }, ...children]] : children;
