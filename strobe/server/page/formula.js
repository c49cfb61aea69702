// Formulas as MathML, which browsers set themselves. KaTeX reads their TeX; it is loaded with the
// first formula.

const OPTIONS = { output: "mathml", strict: "ignore", maxSize: 50, maxExpand: 1000 };

let katex = null; // a promise of it

/** Show a formula in an element: its text until KaTeX is there, and for good if it cannot read it. */
export async function showFormula(place, tex, displayMode) {
  if (place.dataset.tex === tex) return;
  place.dataset.tex = tex;
  place.replaceChildren(tex);
  place.classList.add("raw");
  try {
    await (katex ??= import("./katex.js"));
    if (place.dataset.tex !== tex) return; // another one came meanwhile
    const shown = new DocumentFragment();
    globalThis.katex.render(tex, shown, { ...OPTIONS, displayMode });
    alignColumns(shown);
    chooseLetters(shown);
    place.replaceChildren(shown);
    place.classList.remove("raw");
  } catch {
    // The text stays.
  }
}

/** Alphabets that browsers take no attribute for: the code points of A and a, and the letters that
 * Unicode had before, and elsewhere. */
const ALPHABETS = {
  "double-struck": { A: 0x1d538, a: 0x1d552, others: { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" } },
  script: {
    A: 0x1d49c,
    a: 0x1d4b6,
    others: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  },
  fraktur: { A: 0x1d504, a: 0x1d51e, others: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" } },
};

/** Write letters of other alphabets as characters of their own. Styles make the bold ones. */
function chooseLetters(shown) {
  for (const one of shown.querySelectorAll("[mathvariant]")) {
    const alphabet = ALPHABETS[one.getAttribute("mathvariant")];
    if (!alphabet || one.childElementCount) continue;
    one.textContent = one.textContent.replace(/[A-Za-z]/g, (letter) => {
      const first = letter < "a" ? "A" : "a";
      const code = alphabet[first] + letter.charCodeAt() - first.charCodeAt();
      return alphabet.others[letter] ?? String.fromCodePoint(code);
    });
  }
}

/** Align the columns of tables by classes: browsers read no columnalign. */
function alignColumns(shown) {
  for (const table of shown.querySelectorAll("mtable[columnalign]")) {
    const sides = table.getAttribute("columnalign").trim().split(/\s+/);
    for (const row of table.children) {
      for (const [i, cell] of [...row.children].entries()) {
        cell.classList.add(sides[Math.min(i, sides.length - 1)]);
      }
    }
  }
}
