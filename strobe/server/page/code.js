// Code as text and spans with classes. Highlight.js reads it; it is loaded with the first block of
// code that names its language.

const MAX_CHARS = 20_000; // of the longest block of code that is highlighted

/** The page's classes of code, by Highlight.js's scopes; the innermost scope counts. */
const CLASSES = {
  comment: "comment",
  quote: "comment",
  doctag: "comment",
  keyword: "keyword",
  type: "keyword",
  name: "keyword",
  section: "keyword",
  "selector-tag": "keyword",
  built_in: "name",
  title: "name",
  attr: "name",
  attribute: "name",
  meta: "name",
  "selector-class": "name",
  "selector-id": "name",
  string: "string",
  regexp: "string",
  char: "string",
  addition: "string",
  code: "string",
  number: "value",
  literal: "value",
  symbol: "value",
  bullet: "value",
  link: "value",
  deletion: "value",
};

let library; // undefined until it is needed, null if it cannot be loaded
let loading = null;

/** A promise while Highlight.js loads, else null: until then code has no colours. */
export const pendingColours = () => loading;

/** Code as text and spans; as text alone if its language is not known. */
export function highlight(code, language) {
  if (!code) return [];
  if (!language || code.length > MAX_CHARS) return [code];
  if (library === undefined) {
    loading ??= load();
    return [code];
  }
  if (!library?.getLanguage(language)) return [code];
  const { root } = library.highlight(code, { language, ignoreIllegals: true })._emitter;
  const parts = []; // [class, text]
  collect(root, parts);
  return parts.map(([name, text]) => (name ? ["span", { class: name }, text] : text));
}

/** Add the parts of a node of Highlight.js's tree. Blanks belong to the part before them. */
function collect({ scope, children }, parts) {
  const name = CLASSES[scope?.split(".")[0]] ?? "";
  for (const child of children) {
    const last = parts.at(-1);
    if (typeof child !== "string") collect(child, parts);
    else if (last && (last[0] === name || !child.trim())) last[1] += child;
    else parts.push([name, child]);
  }
}

async function load() {
  try {
    library = (await import("./highlight.js")).default;
  } catch {
    library = null; // code stays without colours
  }
  loading = null;
}
