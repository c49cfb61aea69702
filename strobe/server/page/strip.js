// The strip of accepted lengths: one bar per step, and its mean.

import { element } from "./dom.js";

/**
 * Bars of one answer. A bar shows the step's tokens: accepted drafts, then the target's own; its
 * pale part shows rejected drafts.
 */
export class Strip {
  constructor() {
    this.bars = element("div", { class: "bars", role: "img" });
    this.mean = element("span", { class: "mean" });
    this.caption = element("figcaption", {}, "Accepted length per step ", this.mean);
    this.element = element("figure", { class: "strip", hidden: true }, this.caption, this.bars);
    this.line = element("i", { class: "line", hidden: true });
    this.bars.append(this.line);
    this.height = 4;
    this.steps = 0;
    this.accepted = 0;
    this.drafted = 0;
  }

  /** Mean tokens per verify step, null before the first one; steps without drafts do not count. */
  get acceptanceLength() {
    return this.steps ? 1 + this.accepted / this.steps : null;
  }

  /** Add a bar for a step after the prefill. own, kept: its tokens from the target and from drafts. */
  add({ drafted, accepted }, own, kept) {
    const bar = element("i", { class: "bar" });
    for (const [name, value] of Object.entries({ kept, own, drafted: drafted + 1 })) {
      bar.style.setProperty(`--${name}`, value);
    }
    this.element.hidden = false;
    this.bars.append(bar);
    this.scale(Math.max(drafted + 1, own + kept));
    if (drafted) {
      this.steps += 1;
      this.accepted += accepted;
      this.drafted += drafted;
    }
    this.describe();
    return bar;
  }

  /** Make room for bars of so many tokens. */
  scale(height) {
    this.height = Math.max(this.height, height);
    this.bars.style.setProperty("--height", this.height);
  }

  describe() {
    const bars = this.bars.childElementCount - 1;
    const mean = this.acceptanceLength;
    this.line.hidden = mean === null;
    if (mean !== null) this.bars.style.setProperty("--mean", mean);
    const words = mean === null ? "one token each, nothing drafted" : `mean ${mean.toFixed(1)}`;
    this.mean.textContent = words;
    this.bars.setAttribute("aria-label", `Accepted length of ${bars} steps: ${words}`);
  }

  /** Scroll to the last bar if there are more than fit. */
  follow() {
    this.bars.scrollLeft = this.bars.scrollWidth;
  }
}
