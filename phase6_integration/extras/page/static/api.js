// The server: requests with the API key, server-sent events, and errors in its own words.

export class Refused extends Error {
  /** `key`: the one that the request was sent with. */
  constructor(status, message, { code, key } = {}) { super(message); Object.assign(this, { status, code, key }); }
}

let key = "";  // kept nowhere else
const waiting = [];  // what a new key lets go on

export const hasKey = () => key !== "";

export function useKey(given) {
  key = given;
  for (const go of waiting.splice(0)) go();
}

/** Resolves once there is another key than the refused one. It may have been given before the refusal came. */
export const anotherKey = (refused) => new Promise((resolve) => { if (key === refused.key) waiting.push(resolve); else resolve(); });

/** Sends a request. Throws what the server refuses, and what keeps it from being reached. */
export async function send(path, { body, ...options } = {}) {
  const sent = key, headers = sent ? { Authorization: `Bearer ${sent}` } : {};
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) }), (headers["Content-Type"] = "application/json");
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    throw options.signal?.aborted ? error : new Refused(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  let error = { message: `The server answered ${response.status}.` };
  try { error = (await response.json()).error ?? error; } catch { /* a proxy's page, say: the status is all there is */ }
  throw new Refused(response.status, error.message, { code: error.code, key: sent });
}

/** The data of server-sent events, as they come: a list for each piece that arrives. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
    }
  } finally {
    reader.cancel().catch(() => {});  // whoever reads no further hangs up
  }
}

/** Streams a completion. `heard` is called with each piece of each choice. Returns what is known of the answer: the usage,
 *  the finish reasons, the times and the tokens. `told` is called with each chunk. */
export async function stream(path, body, signal, heard = () => {}, told = () => {}) {
  const answer = { usage: null, reasons: [], began: performance.now(), first: 0, last: 0 };
  const response = await send(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  for await (const batch of events(response)) {
    for (const data of batch) {
      if (data === "[DONE]") return answer;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error.message, { code: chunk.error.code });
      told(chunk);
      answer.usage = chunk.usage ?? answer.usage;
      for (const { index, delta, text = (delta?.reasoning_content ?? "") + (delta?.content ?? ""), finish_reason: reason } of chunk.choices) {
        if (reason) answer.reasons[index] = reason;
        if (text) {
          answer.last = performance.now();
          answer.first ||= answer.last;
        }
        if (text || reason) heard(text, index, reason);
      }
    }
  }
  throw new Refused(0, "The connection ended before the answer did.");
}
