// The conversation on the page: its turns, and the answers that stream into them.

import { Answer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { button, byId, number } from "./dom.js";
import { Progress, ROUNDS, verdict } from "./race.js";
import * as settings from "./settings.js";
import { ServerError, stream } from "./stream.js";
import { Turn } from "./turn.js";

const log = byId("log");

/** Announce a text to screen readers. */
export function say(text) {
  byId("status").textContent = text;
}

export class Chat {
  /**
   * model: returns the served model's name, as a promise. onChange: called after every change of
   * what is shown; onSave: with the conversation, after every change of it. onShare, onPicture:
   * called with a turn, and with the button that was pressed; onUnreachable: with a sentence, when
   * a request does not reach the server.
   */
  constructor({ model, onChange, onSave, onShare, onPicture, onUnreachable }) {
    Object.assign(this, { model, onChange, onSave, onShare, onPicture, onUnreachable });
    this.conversation = new Conversation();
    this.turns = [];
    this.running = null; // the AbortController of the current stream
    this.changed = new Set(); // answers to paint with the next frame
    this.frame = null;
  }

  // ---- what is shown ----

  /** Show a conversation. */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.render();
  }

  render() {
    const { path } = this.conversation;
    this.turns = [];
    for (const node of path) {
      if (node.role !== "assistant") this.turns.push(new Turn(node));
      else if (this.turns.at(-1)?.answerNode === null) this.restore(this.turns.at(-1), node);
      else this.restore(this.turns[this.turns.push(new Turn(null)) - 1], node);
    }
    log.replaceChildren(...this.turns.map(({ element }) => element));
    this.refresh();
  }

  restore(turn, node) {
    const answers = turn.restore(node, settings.view());
    if (node.race) turn.results.append(verdict(...answers, node.race));
  }

  /** Show all answers in the view of this name. */
  show(view) {
    for (const { shown } of this.turns) for (const answer of shown) answer.show(view);
  }

  refresh() {
    for (const turn of this.turns) turn.offer(this.offers(turn));
    log.setAttribute("aria-busy", String(Boolean(this.running)));
    this.onChange();
  }

  offers(turn) {
    const { node, answerNode } = turn;
    const isUser = node?.role === "user";
    const idle = !this.running;
    const last = turn === this.turns.at(-1);
    const cut = ["length", null].includes(turn.shown.at(-1)?.finishReason ?? null);
    const canResume = last && cut && answerNode?.content && !answerNode.race && answerNode.record;
    return {
      said: node && idle ? this.versions(node) : NONE,
      answered: answerNode && idle ? this.versions(answerNode) : NONE,
      edit: idle && isUser && (() => turn.edit((text) => this.editMessage(turn, text))),
      regenerate: idle && node && (() => this.again(turn)),
      resume: idle && canResume && (() => this.resume(turn)),
      share: node && answerNode?.request && (({ target }) => this.onShare(turn, target)),
      picture: answerNode && (() => this.onPicture(turn)),
    };
  }

  versions(node) {
    const all = this.conversation.versions(node);
    return { all, at: all.indexOf(node), choose: (version) => this.choose(version) };
  }

  choose(version) {
    this.conversation.choose(version);
    this.onSave(this.conversation);
    this.render();
  }

  // ---- sending ----

  /** Send a message. Returns whether it was answered. */
  async send(content, files, compare) {
    const [call] = this.conversation.pending;
    const fields = call ? { role: "tool", call } : { role: "user", files };
    this.dropFailed();
    const node = this.conversation.add({ ...fields, content });
    const turn = this.addTurn(node);
    if (this.conversation.pending.length) return this.saved();
    return this.answer(turn, { compare });
  }

  /** Compare on the last message again. */
  async compareAgain() {
    this.dropFailed();
    const turn = this.turns.findLast(({ node }) => node);
    return turn ? this.again(turn, { compare: true }) : false;
  }

  /** Answer a message again, with another seed. */
  async again(turn, { compare = false } = {}) {
    const before = turn.shown.at(-1)?.raw;
    this.endAt(turn);
    const answered = await this.answer(turn, { compare, seed: randomSeed() });
    const answer = turn.shown.at(-1);
    if (answered && !compare && answer.raw === before) answer.note(settings.whyTheSame());
    return answered;
  }

  editMessage({ node }, content) {
    this.conversation.leaf = node.parent;
    const { role, files } = node;
    const edited = this.conversation.add({ role, files, content });
    this.render();
    return this.answer(this.turns.find((turn) => turn.node === edited), {});
  }

  /** Continue an answer that was cut. */
  async resume(turn) {
    const { conversation } = this;
    const [answer] = turn.shown;
    const node = turn.answerNode;
    await this.whileRunning(async (signal) => {
      const body = await this.body({ continue_final_message: true });
      answer.resume();
      await this.stream(answer, body, { signal });
    });
    Object.assign(node, answer.node);
    if (this.conversation === conversation) this.saved();
    else this.onSave(conversation);
  }

  stop() {
    this.running?.abort();
  }

  /** End the path with a turn's message, and clear its answer and the turns after it. */
  endAt(turn) {
    this.conversation.leaf = turn.node.id;
    const at = this.turns.indexOf(turn);
    for (const later of this.turns.splice(at + 1)) later.element.remove();
    turn.clear();
  }

  addTurn(node) {
    const turn = new Turn(node);
    this.turns.push(turn);
    log.append(turn.element);
    return turn;
  }

  /** Show turns that failed as the conversation has them: not, or with an earlier answer. */
  dropFailed() {
    if (this.turns.some(({ element }) => element.classList.contains("failed"))) this.render();
  }

  // ---- answering ----

  /** Stream one answer, or a race of two, into a turn. Returns whether there is an answer. */
  async answer(turn, { compare = false, seed }) {
    const { conversation } = this;
    const previous = conversation.versions({ parent: turn.node.id }).at(-1);
    const race = compare ? { rounds: [], inTurns: settings.inTurns() } : null;
    let request;
    const answer = await this.whileRunning(async (signal) => {
      const body = await this.body(seed === undefined ? {} : { seed });
      request = { ...body, messages: undefined, system: settings.systemMessage() };
      return compare ? this.race(turn, body, race, signal) : this.only(turn, body, signal);
    });
    const answered = answer.numTokens > 0;
    if (answered) {
      turn.answerNode = conversation.add({ ...answer.node, request, ...(race && { race }) });
    } else if (previous && this.conversation === conversation) {
      turn.element.classList.add("failed"); // the earlier answer stays in the conversation
      conversation.choose(previous);
    } else {
      turn.element.classList.add("failed");
      conversation.remove(turn.node);
      const edited = conversation.versions(turn.node).at(-1);
      if (edited) conversation.choose(edited); // the message before the edit, and what followed
    }
    if (this.conversation === conversation) this.saved();
    else if (answered) this.onSave(conversation);
    return answered;
  }

  saved() {
    if (this.conversation.nodes.size) this.onSave(this.conversation);
    this.refresh();
    return true;
  }

  async whileRunning(work) {
    const running = (this.running = new AbortController());
    this.refresh();
    say("Answering …");
    try {
      return await work(running.signal);
    } finally {
      if (this.running === running) this.running = null;
    }
  }

  /** The request for the path's next answer. */
  async body(more) {
    const name = await this.model();
    const system = settings.systemMessage();
    const head = system ? [{ role: "system", content: system }] : [];
    const messages = [...head, ...this.conversation.messages];
    return { model: name, messages, seed: randomSeed(), ...settings.request(), ...more };
  }

  only(turn, body, signal) {
    return this.stream(turn.add(makeAnswer("Answer")), body, { signal });
  }

  /** Run a request without and with speculation, ROUNDS times, and show the first round. race: gets
   * the results. Returns the answer with speculation. */
  async race(turn, body, race, signal) {
    const { seed, temperature = null } = body;
    Object.assign(race, { seed, temperature });
    turn.element.classList.add("compared");
    const off = turn.add(makeAnswer("Speculation off"));
    const on = turn.add(makeAnswer("Speculation on"));
    if (race.inTurns) on.element.classList.add("waiting");
    const progress = new Progress();
    turn.results.append(progress.element);
    await this.round(off, on, body, race, { signal, progress });
    while (race.rounds.length < ROUNDS && !off.failed && !on.failed && on.report?.used) {
      say(`Measuring again: run ${race.rounds.length + 1} of ${ROUNDS} …`);
      const again = [makeAnswer("Speculation off"), makeAnswer("Speculation on")];
      const measured = { signal, progress, silent: true, expected: [off, on] };
      if (!(await this.round(...again, body, race, measured))) break;
    }
    race.off = off.record;
    const result = verdict(off, on, race);
    progress.element.replaceWith(result);
    say(result.querySelector("p")?.textContent ?? result.textContent);
    return on;
  }

  /** Run both lanes once. expected: answers as long as these will be, if that is known. Returns
   * whether both ended, and then adds their rates to the race. */
  async round(off, on, body, race, { signal, progress, silent = false, expected = [] }) {
    const run = race.rounds.length;
    const show = (answer, lane) => {
      const model = expected[lane === "on" ? 1 : 0] ?? (race.inTurns && lane === "on" ? off : null);
      const length = model?.numTokens ?? body.max_tokens ?? FULL_BAR;
      progress.show(run, lane, answer.numTokens / Math.max(length, 1));
    };
    const watch = (lane) => ({ signal, silent, onChunk: (answer) => show(answer, lane) });
    const first = () => this.stream(off, { ...body, speculation: false }, watch("off"));
    const speculation = body.speculation || settings.SHOWN; // off: what the server does
    const second = () => this.stream(on, { ...body, speculation }, watch("on"));
    if (!race.inTurns) {
      await Promise.all([first(), second()]);
    } else {
      await first();
      on.element.classList.remove("waiting");
      if (off.failed) on.fail("Not run, because the other one did not end.", "note");
      else await second();
    }
    const ended = !off.failed && !on.failed;
    if (ended) race.rounds.push({ off: off.rate, on: on.rate });
    return ended;
  }

  /** Stream a request into an answer; failures are shown there, except that of a server that cannot
   * be reached. silent: it is not on the page; onChunk: called with the answer after each chunk. */
  async stream(answer, body, { signal, silent = false, onChunk = () => {} }) {
    answer.times.started = performance.now();
    try {
      for await (const { chunk, time } of stream(body, settings.apiKey(), signal)) {
        answer.feed(chunk, time);
        onChunk(answer);
        if (!silent) this.paint(answer);
      }
      await answer.finish();
      const { content, numTokens } = answer;
      if (!silent) say(`${content || "The answer has no text."} ${number(numTokens)} tokens.`);
    } catch (error) {
      if (signal.aborted) {
        await answer.fail("Stopped.", "note");
        say("Stopped.");
      } else {
        const known = error instanceof ServerError;
        if (error.unreachable) {
          await answer.fail(answer.numTokens ? "The answer was cut off." : null, "note");
          this.onUnreachable(error.message);
          return answer;
        }
        await answer.fail(known ? error.message : `The page failed: ${error.message}`, "error");
        if (error.status === 401) answer.notes.append(keyButton());
        if (!known) console.error(error);
      }
    }
    return answer;
  }

  /** Bring an answer up to date with the next frame. */
  paint(answer) {
    this.changed.add(answer);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const one of this.changed) one.paint();
      this.changed.clear();
    });
  }
}

const NONE = { all: [] };

const FULL_BAR = 500; // tokens that fill the first lane's bar while its length is not known

const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

const makeAnswer = (title) => new Answer(title, settings.view());

export const keyButton = () => button("Enter the API key", () => settings.openAt("key"));
