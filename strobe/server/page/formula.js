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
    place.replaceChildren(shown);
    place.classList.remove("raw");
  } catch {
    // The text stays.
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
