// Helpers for elements. Text becomes text nodes only, so a model's text is never markup.

/** element("p", {class: "note", hidden: true}, "text", child). Booleans set or omit attributes. */
export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Format a number as 1,234 or 12.3, with a fraction only below 100. */
export function number(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}

/** counted(2, "step"): 2 steps. */
export function counted(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** A button that calls `press`. */
export function button(label, press, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, label);
  node.addEventListener("click", press);
  return node;
}

/** A button that copies the text that `read` returns, and says so. */
export function copyButton(read) {
  const node = button("Copy", async () => {
    node.textContent = (await copy(read())) ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  }, { class: "quiet" });
  return node;
}

/** Show choices, as [label, act], in the menu at an element. */
export function showMenu(choices, { right, bottom }) {
  const menu = byId("menu");
  menu.replaceChildren(
    ...choices.map(([label, act]) =>
      button(label, () => {
        menu.hidePopover();
        act();
      }, { class: "quiet" }),
    ),
  );
  menu.showPopover();
  menu.style.left = `${Math.max(8, right - menu.offsetWidth)}px`;
  menu.style.top = `${Math.min(bottom, innerHeight - menu.offsetHeight - 8)}px`;
  menu.firstChild.focus();
}

/** Copy a text. Pages without HTTPS have no clipboard but the selection's. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { class: "unseen" });
    field.value = text;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}
