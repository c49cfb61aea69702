// Making elements. Text goes in as text nodes only, so nothing a model writes is ever markup.

/** element("p", {class: "note", hidden: true}, "text", child). Booleans set or omit attributes. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** 1,234 or 12.3: three digits or more need no fraction. */
export function number(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}
