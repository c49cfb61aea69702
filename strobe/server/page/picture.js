// A picture of an answer, token by token, with its strip and its figures.

const WIDTH = 1200;
const MARGIN = 48;
const LINE = 30;
const SCALE = 2;

/** Draw an answer. title: what was asked; about: the model; lines: of text under the figures.
 * Returns a promise of a PNG. */
export function draw(answer, { title, about, lines }) {
  const canvas = document.createElement("canvas");
  const pen = canvas.getContext("2d");
  const colour = colours();
  // Once to measure the height, and once on a canvas of it.
  let bottom = paint(pen, colour, answer, title, about, lines);
  canvas.width = WIDTH * SCALE;
  canvas.height = bottom * SCALE;
  pen.scale(SCALE, SCALE);
  pen.fillStyle = colour("page");
  pen.fillRect(0, 0, WIDTH, bottom);
  paint(pen, colour, answer, title, about, lines);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** The colours of the page's style, by name. */
function colours() {
  const probe = document.createElement("i");
  document.body.append(probe);
  const known = {};
  for (const name of ["page", "text", "soft", "accepted", "accepted-strong", "own", "own-strong",
    "error", "ghost", "line"]) {
    probe.style.color = `var(--${name})`;
    known[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return (name) => known[name];
}

function paint(pen, colour, answer, title, about, lines) {
  const { mono, sans } = fonts();
  pen.textBaseline = "alphabetic";
  let y = MARGIN + 20;
  const write = (text, font, name, x = MARGIN) => {
    pen.font = font;
    pen.fillStyle = colour(name);
    pen.fillText(text, x, y);
  };
  write("Strobe", `650 22px ${sans}`, "text");
  write(about, `15px ${sans}`, "soft", MARGIN + 96);
  for (const line of wrap(pen, title, `600 19px ${sans}`)) {
    y += LINE + 4;
    write(line, `600 19px ${sans}`, "text");
  }
  y = tokens(pen, colour, answer, mono, y + 1.6 * LINE);
  y = strip(pen, colour, answer, y + 20);
  for (const line of lines.flatMap((line) => wrap(pen, line, `16px ${sans}`))) {
    y += 26;
    write(line, `16px ${sans}`, "soft");
  }
  return Math.ceil(y + MARGIN);
}

function fonts() {
  const style = getComputedStyle(document.documentElement);
  return {
    mono: style.getPropertyValue("--mono") || "monospace",
    sans: style.getPropertyValue("--sans") || "sans-serif",
  };
}

function wrap(pen, text, font) {
  pen.font = font;
  const lines = [];
  for (const paragraph of text.split("\n")) {
    let line = "";
    for (const word of paragraph.split(/(?<=\s)/)) {
      if (line && pen.measureText(line + word.trimEnd()).width > WIDTH - 2 * MARGIN) {
        lines.push(line);
        line = "";
      }
      line += word;
    }
    lines.push(line);
  }
  return lines;
}

/** Draw the tokens from a baseline on. Returns the last baseline. */
function tokens(pen, colour, answer, mono, top) {
  let [x, y] = [MARGIN, top];
  const put = (text, style) => {
    pen.font = `${style.struck ? 13 : 16}px ${mono}`;
    for (const part of text.split(/(\n)/)) {
      if (part === "\n") {
        [x, y] = [MARGIN, y + LINE];
        continue;
      }
      for (const piece of part.match(/.{1,60}/gu) ?? []) {
        const { width } = pen.measureText(piece);
        if (x > MARGIN && x + width > WIDTH - MARGIN) [x, y] = [MARGIN, y + LINE];
        if (style.paper) {
          pen.fillStyle = colour(style.paper);
          pen.fillRect(x, y - 18, width, 24);
        }
        pen.fillStyle = colour(style.ink ?? "text");
        pen.fillText(piece, x, y);
        if (style.line) {
          pen.fillStyle = colour(style.line);
          pen.fillRect(x, style.struck ? y - 5 : y + 5, width, 1.5);
        }
        x += width;
      }
    }
  };
  for (const { step, delta } of answer.parts) {
    const pieces = step?.tokens ?? [[delta.content ?? "", null]];
    for (const [i, [piece, isDraft]] of pieces.entries()) {
      if (i === step?.accepted && step.rejected?.length) {
        const text = step.rejected.join("").trim().replace(/\s*\n\s*/g, "↵");
        put(text, { ink: "soft", line: "error", struck: true });
      }
      if (isDraft === null) put(piece, {});
      else put(piece, isDraft ? { paper: "accepted" } : { paper: "own", line: "own-strong" });
    }
  }
  return y;
}

/** Draw the strip below a baseline. Returns its lower edge. */
function strip(pen, colour, answer, top) {
  const steps = answer.parts.map(({ step }) => step).filter((step) => step?.drafted);
  if (!steps.length) return top;
  const width = Math.min(16, (WIDTH - 2 * MARGIN) / steps.length);
  const most = Math.max(...steps.map(({ drafted }) => drafted + 1));
  const unit = 64 / most;
  const bar = (x, from, to, name) => {
    pen.fillStyle = colour(name);
    pen.fillRect(x, top + 64 - to * unit, Math.max(width - 2, 1), (to - from) * unit);
  };
  for (const [i, step] of steps.entries()) {
    const x = MARGIN + i * width;
    const kept = step.tokens.filter(([, isDraft]) => isDraft).length;
    bar(x, 0, step.drafted + 1, "ghost");
    bar(x, 0, kept, "accepted-strong");
    bar(x, kept, step.tokens.length, "own-strong");
  }
  return top + 64;
}
