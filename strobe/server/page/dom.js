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
