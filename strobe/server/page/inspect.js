// The note on a token or step, shown for the pointer, a tap or the arrow keys.

import { stepOf, tokenOf, visible } from "./tokens.js";
import { byId, element } from "./dom.js";

const note = byId("token-note");
let lit = [];
let described = null;

/** Listen on the element that holds the answers. */
export function inspect(log) {
  log.addEventListener("pointerover", ({ target, pointerType }) => {
    if (pointerType === "mouse") show(target);
  });
  log.addEventListener("pointerleave", hide);
  log.addEventListener("focusin", ({ target }) => show(target));
  log.addEventListener("focusout", hide);
  log.addEventListener("click", ({ target }) => {
    if (!tokenOf.has(target)) show(target);
    else if (getSelection().isCollapsed) target.focus({ preventScroll: true });
  });
  log.addEventListener("keydown", move);
  const stay = () => (described === document.activeElement ? place(described) : hide());
  addEventListener("scroll", () => !note.hidden && stay(), { passive: true });
}

/** Hide the note. */
export function hide() {
  note.hidden = true;
  for (const other of lit) other.classList.remove("lit");
  lit = [];
  described?.removeAttribute("aria-describedby");
  described = null;
}

function show(target) {
  hide();
  const known = tokenOf.get(target) ?? stepOf.get(target.closest("del") ?? target);
  if (!known) return;
  const { view, token } = known;
  const index = token ? token.step : known.first;
  const step = index === null ? null : view.steps[index];
  const steps = view.steps.slice(index, (token ? index : known.last) + 1);
  lit = step ? steps.flatMap(({ spans, bar }) => (bar ? [...spans, bar] : spans)) : [target];
  for (const other of lit) other.classList.add("lit");
  const lines = [stepLine(step, index, known.last)];
  if (step?.rejected?.length) lines.push(` Rejected: ${visible(step.rejected.join(""))}`);
  if (token) lines.unshift(element("b", {}, visible(token.piece)), ` ${origin(token, step, step?.spans.indexOf(target))}`);
  if (token) lines.splice(2, 0, element("br"));
  note.replaceChildren(...lines);
  note.hidden = false;
  place(target);
  if (token) {
    target.setAttribute("aria-describedby", note.id);
    described = target;
  }
}

function origin({ own, covered }, step, place) {
  const what = covered === null ? "marker, " : "";
  if (own === null) return "of unknown origin";
  const sure = step?.confidence?.[place];
  const percent = sure === undefined ? "" : `, confidence ${Math.floor(100 * sure)} %`;
  if (!own) return `${what}drafted and accepted${percent}`;
  return step.drafted || step.bar ? `${what}the target’s own` : `${what}the first token`;
}

function stepLine(step, index, last = index) {
  if (!step) return "The server sent no steps.";
  if (last > index) return `Steps ${index} to ${last}: nothing was drafted.`;
  if (!step.bar) return "From the prompt’s own forward pass, before any step.";
  if (!step.drafted) return `Step ${index}: nothing was drafted.`;
  return `Step ${index}: ${step.accepted} of ${step.drafted} drafts accepted.`;
}

/** Place the note above the target, or below if there is no room, inside the window. */
function place(target) {
  const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = note;
  const room = document.documentElement.clientWidth - width - 8;
  const top = box.top - height - 6;
  note.style.left = `${Math.max(8, Math.min(box.left, room))}px`;
  note.style.top = `${top > 8 ? top : box.bottom + 6}px`;
}

/** Handle arrow keys (previous and next token or step), Home and End. */
function move(event) {
  const here = tokenOf.get(event.target);
  if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
  const { view } = here;
  const spans = view.spans.filter((span) => span.getClientRects().length);
  const at = spans.indexOf(event.target);
  const jump = (by) => view.steps[here.token.step + by]?.spans[0];
  const next = {
    ArrowLeft: () => spans[at - 1],
    ArrowRight: () => spans[at + 1],
    ArrowUp: () => jump(-1),
    ArrowDown: () => jump(1),
    Home: () => spans[0],
    End: () => spans.at(-1),
  }[event.key];
  if (!next) return;
  event.preventDefault();
  const span = next();
  if (!span || !spans.includes(span)) return;
  event.target.tabIndex = -1;
  span.tabIndex = 0;
  span.focus({ preventScroll: true });
  const { top, bottom } = span.getBoundingClientRect();
  if (top < 80 || bottom > innerHeight - 160) span.scrollIntoView({ block: "center" });
}
