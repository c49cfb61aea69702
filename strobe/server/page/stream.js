// Requests to the server: JSON, streams of chunks, and every failure as a sentence.

/** An error with a sentence for the user. status: the HTTP status, 0 without a response;
 * unreachable: the server is not there, or no longer. */
export class ServerError extends Error {
  constructor(sentence, status = 0, unreachable = false) {
    super(sentence);
    Object.assign(this, { status, unreachable });
  }
}

const UNREACHABLE = "The server cannot be reached. Is it still running?";

/** The JSON at a path of this server. Throws ServerError. */
export async function getJson(path, key) {
  const response = await ask(path, { headers: headers(key) });
  if (!response.ok) throw await refusal(response, key);
  return response.json();
}

/** The text of a path. Throws ServerError. */
export async function getText(path, key) {
  const response = await ask(path, { headers: { ...headers(key), Accept: "text/plain" } });
  if (!response.ok) throw await refusal(response, key);
  return response.text();
}

/** The server's states, as /events sends them. Throws as `stream` does. */
export async function* serverEvents(key, signal) {
  const response = await ask("events", { headers: headers(key), signal });
  if (!response.ok) throw await refusal(response, key);
  for await (const { data } of events(response, signal)) yield JSON.parse(data);
}

/**
 * The chunks of one streamed chat completion, each as {chunk, time}: time is performance.now() when
 * its bytes arrived. Ends after [DONE]. Throws ServerError, and what fetch throws on an abort.
 */
export async function* stream(body, key, signal) {
  const response = await post("v1/chat/completions", body, key, signal);
  for await (const { data, time } of events(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(sentence(chunk.error));
    yield { chunk, time };
  }
  throw new ServerError("The connection ended before the answer was complete.");
}

async function post(path, body, key, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response, key);
  return response;
}

/** The data of each server-sent event of a response; bytes may be cut anywhere. */
async function* events(response, signal) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const time = performance.now();
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines.map((line) => line.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line === "" && data.length) {
          yield { data: data.join("\n"), time };
          data = [];
        }
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError) throw error;
    throw new ServerError(UNREACHABLE, 0, true);
  } finally {
    reader.cancel().catch(() => {}); // already closed, or aborted
  }
}

async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError(UNREACHABLE, 0, true);
  }
}

async function refusal(response, key) {
  const { status } = response;
  if (status === 401 || status === 403) {
    const missing = "This server requires an API key. Enter it in the settings.";
    const wrong = "The server does not accept this API key. Correct it in the settings.";
    return new ServerError(key ? wrong : missing, status);
  }
  const answer = await response.json().catch(() => null);
  let text = answer?.error
    ? sentence(answer.error)
    : `The server answered with HTTP status ${status} and no explanation.`;
  const wait = response.headers.get("Retry-After");
  if (wait && /^\d+$/.test(wait)) text += ` Try again in ${wait} s.`;
  return new ServerError(text, status);
}

function sentence(error) {
  return error.message || `The server reported an error without a sentence (${error.type}).`;
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}
