// Links that reproduce a run: its prompt, its seed and its settings, in the address's fragment, which
// browsers send to no server.

const MARK = "run=";

/** The link of a run: {prompt, files, request, history}. */
export async function linkOf(run) {
  const text = JSON.stringify({ strobe: 1, ...run });
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(text));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  const code = btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return `${location.origin}${location.pathname}#${MARK}${code}`;
}

/** The run in an address's fragment, null without one. Throws an Error for a broken one. */
export async function runIn(fragment) {
  if (!fragment.startsWith(`#${MARK}`)) return null;
  const code = fragment.slice(MARK.length + 1).replaceAll("-", "+").replaceAll("_", "/");
  const bytes = Uint8Array.from(atob(code), (character) => character.charCodeAt(0));
  const text = await through(new DecompressionStream("deflate-raw"), bytes);
  const run = JSON.parse(new TextDecoder().decode(text));
  if (typeof run.prompt !== "string" || typeof run.request !== "object") throw new Error("no run");
  return run;
}

async function through(transform, bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(transform).getReader();
  const chunks = [];
  for (let part; !(part = await reader.read()).done; ) chunks.push(part.value);
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
}
