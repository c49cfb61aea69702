// The strip of accepted lengths: one bar per step with drafts, and their mean.

import { counted, element, number } from "./dom.js";

/**
 * Bars of one answer. A bar shows the step's tokens: accepted drafts, then the target's own; its
 * pale part shows rejected drafts. Steps without drafts, one after the other, are one mark.
 */
export class Strip {
  constructor() {
    this.bars = element("div", { class: "bars", role: "img" });
    this.mean = element("span", { class: "mean" });
    this.caption = element("figcaption", {}, "Tokens per step ", this.mean);
    this.element = element("figure", { class: "strip", hidden: true }, this.caption, this.bars);
    this.line = element("i", { class: "line", hidden: true });
    this.bars.append(this.line);
    this.height = 4;
    this.steps = 0; // that carried drafts
    this.accepted = 0;
    this.plain = 0; // steps that carried none
    this.run = null; // the mark of the steps without drafts before the next bar
  }

  /** Mean tokens per step that carried drafts, null before the first one. */
  get acceptanceLength() {
    return this.steps ? 1 + this.accepted / this.steps : null;
  }

  /** Add a step after the prefill. own, kept: its tokens from the target and from drafts. Returns
   * its bar, or the mark that it shares with the steps before it. */
  add({ drafted, accepted }, own, kept) {
    const bar = drafted ? this.addBar(drafted, own, kept) : this.addPlain();
    this.steps += drafted > 0;
    this.accepted += accepted;
    this.describe();
    return bar;
  }

  addBar(drafted, own, kept) {
    const bar = element("i", { class: "bar" });
    for (const [name, value] of Object.entries({ kept, own, drafted: drafted + 1 })) {
      bar.style.setProperty(`--${name}`, value);
    }
    this.run = null;
    this.element.hidden = false;
    this.bars.append(bar);
    this.scale(Math.max(drafted + 1, own + kept));
    return bar;
  }

  addPlain() {
    this.plain += 1;
    if (!this.run) {
      this.run = element("i", { class: "plain" });
      this.runLength = 0;
      this.bars.append(this.run);
    }
    this.runLength += 1;
    this.run.textContent = this.runLength > 1 ? this.runLength : "";
    return this.run;
  }

  /** Make room for bars of so many tokens. */
  scale(height) {
    this.height = Math.max(this.height, height);
    this.bars.style.setProperty("--height", this.height);
  }

  describe() {
    const mean = this.acceptanceLength;
    this.line.hidden = mean === null;
    if (mean === null) return;
    this.bars.style.setProperty("--mean", mean);
    const plain = this.plain ? `, and ${number(this.plain)} without drafts` : "";
    this.mean.textContent = `mean ${mean.toFixed(1)} in ${counted(this.steps, "step")}${plain}`;
    this.bars.setAttribute("aria-label", `Tokens per step: ${this.mean.textContent}`);
  }

  /** Scroll to the last bar if there are more than fit. */
  follow() {
    this.bars.scrollLeft = this.bars.scrollWidth;
  }
}
