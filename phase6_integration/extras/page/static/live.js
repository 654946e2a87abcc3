// The live record: /record, line by line, into the viewer. Its lines come with a key where one is needed, so that the
// stream is read by fetch and not by EventSource, which sends no headers.

import { anotherKey, events, send } from "./api.js";

const BATCH = 50;  // milliseconds between two updates of the viewer
const AGAIN = [500, 1000, 2000, 5000];  // milliseconds before the next attempt

// An engine that has done nothing yet is shown too: a line that changes nothing follows the header. And requests get the
// names that their clients know: the engine's have a number between that of the answer and that of the output.
function shown(line) {
  for (const request of line.new ?? []) request.id = request.id.replace(/-\d+(-\d+)$/, "$1");
  return "record" in line ? [line, { t: 0 }] : [line];
}

const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

/** Watches for ever. `push` gets lines, `say` what is wrong, or nothing. */
export async function watch(push, say) {
  for (let failures = 0; ;) {
    let lines = [], timer = null;
    const flush = () => { timer = null; push(lines); lines = []; };
    try {
      const response = await send("record");
      say("");
      for await (const batch of events(response)) {
        failures = 0;
        for (const data of batch) lines.push(...shown(JSON.parse(data)));
        if (lines.length) timer ??= setTimeout(flush, BATCH);
      }
      say("The stream has ended. It is opened again.");
    } catch (error) {
      say(error.status === 401 ? "To watch the engine, give the API key." : error.message);
      if (error.status === 404) return;  // replicas, or a proxy that keeps it to itself
      if (error.status === 401) { await anotherKey(error); continue; }
    }
    clearTimeout(timer);
    if (lines.length) flush();
    await pause(AGAIN[Math.min(failures++, AGAIN.length - 1)]);
  }
}
