// One turn on the page: a message, the answers to it, and what can be done with them.

import { Answer } from "./answer.js";
import { button, copyButton, element } from "./dom.js";

export class Turn {
  /** node: the message, null for an answer to none. tools: see `offer`. */
  constructor(node) {
    this.node = node;
    this.answerNode = null; // of the conversation, once the answer has one
    this.shown = []; // the answers on the page
    this.message = element("div", { class: `message ${node?.role ?? ""}` });
    this.actions = element("div", { class: "actions small" });
    this.answers = element("div", { class: "answers" });
    this.results = element("div");
    this.answerActions = element("div", { class: "actions small" });
    this.element = element("article", { class: "turn" });
    if (node) this.element.append(element("div", { class: "said" }, this.message, this.actions));
    this.element.append(this.answers, this.results, this.answerActions);
    this.showMessage();
  }

  showMessage() {
    const { role, content, files = [], call } = this.node ?? {};
    const author = role === "tool" ? `Result of ${call.name}` : "You";
    const chips = files.map(({ name, text }) =>
      element(
        "details",
        { class: "chip" },
        element("summary", {}, name),
        element("pre", { tabindex: 0 }, text),
      ),
    );
    this.message.replaceChildren(element("h2", {}, author), ...chips);
    if (content || !chips.length) this.message.append(element("p", {}, content ?? ""));
  }

  /** Add an answer. title: its heading. */
  add(answer) {
    this.shown.push(answer);
    this.answers.append(answer.element);
    return answer;
  }

  /** Show the answer of a node, and the other lane of its race. */
  restore(node, view) {
    this.answerNode = node;
    const record = node.record ?? { parts: [{ delta: { content: node.content } }], times: {} };
    const make = (title, from) => Answer.restore(title, view, { ...EMPTY, ...from });
    if (!node.race) return [this.add(make("Answer", record))];
    this.element.classList.add("compared");
    return [
      this.add(make("Speculation off", node.race.off)),
      this.add(make("Speculation on", record)),
    ];
  }

  clear() {
    this.shown = [];
    this.answerNode = null;
    this.element.classList.remove("compared", "failed");
    this.answers.replaceChildren();
    this.results.replaceChildren();
  }

  /**
   * Offer what can be done. versions: of the message and of the answer, as {all, at, choose};
   * the others: called when pressed, null where they make no sense.
   */
  offer({ said, answered, edit, regenerate, resume, share, picture }) {
    const text = () => this.answerNode?.content ?? this.shown.at(-1)?.content ?? "";
    const when = (label, press) => press && button(label, press, { class: "quiet" });
    replace(this.actions, [
      steps("message", said),
      copyButton(() => this.node.content),
      when("Edit", edit),
    ]);
    replace(
      this.answerActions,
      this.answerNode
        ? [
            steps("answer", answered),
            text() && copyButton(text),
            when("Regenerate", regenerate),
            when("Continue", resume),
            when("Link", share),
            when("Picture", picture),
          ]
        : [],
    );
  }

  /** Let the message be edited. Calls send with its new text, unless that is cancelled. */
  edit(send) {
    const field = element("textarea", { "aria-label": "Edit the message" });
    field.value = this.node.content;
    const stop = () => this.showMessage();
    const form = element(
      "form",
      {},
      field,
      element(
        "div",
        { class: "actions" },
        button("Cancel", stop),
        element("button", { type: "submit", class: "main" }, "Send"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      stop();
      send(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") stop();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.message.replaceChildren(this.message.firstChild, form);
    field.style.height = `${field.scrollHeight + 2}px`;
    field.focus();
  }
}

const EMPTY = {
  parts: [],
  usage: null,
  report: null,
  finishReason: null,
  failed: false,
  firstTokens: 0,
  before: { pieces: 0, tokens: 0 },
  ending: null,
};

/** Buttons that step through the versions of a message, if there are several. */
function steps(noun, { all, at, choose }) {
  if (all.length < 2) return null;
  const step = (sign, by, label) =>
    button(sign, () => choose(all[at + by]), {
      class: "quiet",
      "aria-label": `${label} version of the ${noun}`,
      disabled: !all[at + by],
    });
  return element(
    "span",
    { class: "versions" },
    step("‹", -1, "Previous"),
    `${at + 1} / ${all.length}`,
    step("›", 1, "Next"),
  );
}

function replace(place, nodes) {
  place.replaceChildren(...nodes.filter(Boolean));
}
