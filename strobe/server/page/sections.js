// Assigns each token of an answer to a section. Does not use the DOM.
//
//   raw text   <think>\nHm, 4.\n</think>\n\nIt is 4.     the tokens' pieces, joined
//   reasoning           Hm, 4.                           as split by the server's parser
//   content                                 It is 4.
//
// Pieces are the raw text; delta.reasoning_content and delta.content are parts of it, in order.
// They may lag, because a parser holds back text that may begin a marker. A token that no delta
// covers is a marker, and belongs to the section before it, or to the first one.

export class Sections {
  constructor() {
    this.tokens = []; // {piece, start, own, step, covered: kind or null, section: kind}
    this.raw = "";
    this.cursor = 0; // the raw text before it has been matched
    this.final = 0; // the sections of the tokens before it are final
  }

  /** Add a step's [piece, drafted] pairs and its delta. Returns the index of the first token whose
   * section is new or has changed. */
  push(pairs, step, delta) {
    const before = this.tokens.length;
    for (const [piece, drafted] of pairs) this.add(piece, !drafted, step);
    if (delta.reasoning_content) this.cover("thinking", delta.reasoning_content);
    if (delta.content) this.cover("answer", delta.content);
    if (delta.tool_calls?.length) this.coverCall();
    return this.resolve(before);
  }

  /** Add text without tokens, as servers without steps send it: one piece of unknown origin. */
  pushText(delta) {
    const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
    const before = this.tokens.length;
    if (text) this.add(text, null, null);
    if (text) this.tokens.at(-1).covered = delta.content ? "answer" : "thinking";
    this.cursor = this.raw.length;
    return this.resolve(before);
  }

  add(piece, own, step) {
    const start = this.raw.length;
    this.tokens.push({ piece, start, own, step, covered: null, section: null });
    this.raw += piece;
  }

  cover(kind, text) {
    const start = this.find(text);
    const end = start < 0 ? this.raw.length : start + text.length;
    for (const token of this.unmatched()) {
      const inside = token.start < end && token.start + token.piece.length > start;
      if (inside) token.covered ??= kind;
    }
    this.cursor = end;
  }

  /** Cover a call's raw text, which the delta does not repeat: all remaining tokens, except the
   * closing marker and blanks of the section before. */
  coverCall() {
    let leading = true;
    for (const token of this.unmatched()) {
      if (token.covered) continue;
      leading &&= /^\s*$|^<\//.test(token.piece);
      if (!leading) token.covered = "call";
    }
    this.cursor = this.raw.length;
  }

  /** The position of the next delta: preferably at the start of a token, because a short text such
   * as "t" also occurs inside the marker before it, else anywhere; -1 if it does not occur. */
  find(text) {
    if (this.raw.startsWith(text, this.cursor)) return this.cursor;
    for (const { start } of this.unmatched()) {
      if (start >= this.cursor && this.raw.startsWith(text, start)) return start;
    }
    return this.raw.indexOf(text, this.cursor);
  }

  unmatched() {
    let first = this.tokens.length;
    while (first > 0 && this.tokens[first - 1].start >= this.cursor) first--;
    return this.tokens.slice(Math.max(0, first - 1)); // the previous token may reach over the cursor
  }

  resolve(before) {
    const open = this.tokens.slice(this.final);
    const first = this.tokens[this.final - 1]?.section;
    let last = first ?? open.find((token) => token.covered)?.covered ?? "answer";
    let changed = before;
    const start = this.final;
    for (const [index, token] of open.entries()) {
      last = token.covered ?? last;
      if (token.section !== last) changed = Math.min(changed, start + index);
      token.section = last;
      if (token.covered) this.final = start + index + 1;
    }
    return changed;
  }
}
