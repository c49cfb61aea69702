// TeX formulas in Markdown: $a$, \(a\), $$a$$ and \[a\], as tokens "formula" of markdown-it.
//
// A formula holds no empty line. $a$ begins and ends at a character that is no space, and next to
// no letter, digit or further $, so that prices and names of variables stay text.

const { raw } = String;
const LINE_BREAK = raw`\n(?![ \t]*\n)`;
const WORD = raw`\p{L}\p{N}_`; // the characters of words
const DISPLAYED =
  raw`\$\$(?<dollars>(?:\\[^\n]|[^\\$\n]|${LINE_BREAK})+)\$\$` +
  raw`|\\\[(?<brackets>(?:\\[^\[\]]|[^\\\n]|${LINE_BREAK})+)\\\]`;
const FORMULA =
  `${DISPLAYED}|` +
  raw`(?<![${WORD}$\\])\$(?![\s$])(?<dollar>(?:\\[^\n]|[^\\$\n])+)(?<!\s)\$(?![${WORD}$])` +
  raw`|\\\((?<parentheses>(?:\\[^()]|[^\\\n]|${LINE_BREAK})+)\\\)`;
const INLINE = new RegExp(FORMULA, "uy");
const BLOCK = new RegExp(raw`^(?:${DISPLAYED})\s*$`, "u");
const OPAQUE = new RegExp("`[^`]*(?:`|$)" + raw`|\\\\|${FORMULA}`, "gu");
const OPENING = new RegExp(raw`\$\$|\\[\[(]|(?<![${WORD}$\\])\$(?!\s)`, "gu");
/** Shows that what follows an open formula's mark is text: two words, or an empty line. */
const PROSE = new RegExp(raw`(?<![${WORD}])\p{L}{2,}\s+\p{L}{2,}\s|\n[ \t]*\n`, "u");

/** Make a parser find formulas. */
export function addFormulas(parser) {
  const breaks = { alt: ["paragraph", "reference", "blockquote", "list"] };
  parser.block.ruler.before("fence", "formula", parseBlock, breaks);
  parser.inline.ruler.before("escape", "formula", parseInline);
}

/** A text with its code and its formulas replaced by as many letters. */
export function mask(text) {
  return text.replace(OPAQUE, (match) => "x".repeat(match.length));
}

/** A text that goes on, without the formula that it ends in. */
export function cutOpenFormula(text) {
  const masked = mask(text);
  for (const { 0: mark, index } of masked.matchAll(OPENING)) {
    if (!PROSE.test(masked.slice(index + mark.length))) return text.slice(0, index);
  }
  return text;
}

function parseInline(state, silent) {
  if (!"$\\".includes(state.src[state.pos])) return false;
  INLINE.lastIndex = state.pos;
  const match = INLINE.exec(state.src.slice(0, state.posMax));
  if (!match) return false;
  const { dollars, brackets } = match.groups;
  if (!silent) addToken(state, match, dollars !== undefined || brackets !== undefined);
  state.pos += match[0].length;
  return true;
}

function parseBlock(state, first, last, silent) {
  if (state.sCount[first] - state.blkIndent >= 4) return false; // it is code
  const start = state.bMarks[first] + state.tShift[first];
  const opening = state.src.slice(start, start + 2);
  if (opening !== "$$" && opening !== "\\[") return false;
  const end = endOfBlock(state, first, last, opening);
  const match = BLOCK.exec(state.getLines(first, end, state.blkIndent, false).trimStart());
  if (!match) return false;
  if (silent) return true;
  const token = addToken(state, match, true);
  token.block = true;
  token.map = [first, end];
  state.line = end;
  return true;
}

/** The line after the first one that closes a formula; before it closes, the first line that
 * cannot belong to it. */
function endOfBlock(state, first, last, opening) {
  const closing = opening === "$$" ? "$$" : "\\]";
  for (let number = first; number < last; number++) {
    let line = state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]);
    if (number === first) line = line.slice(opening.length);
    else if (!line || state.sCount[number] < state.blkIndent) return number;
    if (line.includes(closing)) return number + 1;
    if (number > first && line.startsWith(opening)) return number;
  }
  return last;
}

function addToken(state, match, display) {
  const token = state.push("formula", "math", 0);
  token.content = Object.values(match.groups).find((text) => text !== undefined).trim();
  token.meta = { display };
  return token;
}
