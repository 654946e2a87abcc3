// Where the record has no text, the page has that of its own requests: their tokens come with the answers, and what
// tokens say comes from the tokenizer.

import { send } from "./api.js";

export const own = { needed: true, know: () => {} };  // whether the record has no text, as far as is known; `know(id, request)` is told

const vocab = {};

/** The tokens of a conversation or a text, as /tokenize takes it. What each of them says is remembered. */
export async function tokens(body, signal) {
  const answer = await (await send("tokenize", { body: { ...body, return_token_strs: true }, signal })).json();
  answer.tokens.forEach((id, index) => { vocab[id] = answer.token_strs[index]; });
  return answer.tokens;
}

/** The fields of a request, with the one that brings its tokens. */
export const asking = (body) => (own.needed ? { ...body, return_token_ids: true } : body);

/** Collects the tokens of an answer. `hear` takes its chunks, `end` comes after the last. */
export class Listener {
  requests = new Map();  // by their ids in the engine: that of the answer, and the number of the output

  hear(chunk) {
    if (!own.needed) return;
    for (const choice of chunk.choices) {
      const id = `${chunk.id}-${choice.index}`;
      if (!this.requests.has(id)) this.requests.set(id, { tokens: null, ids: [], text: "" });
      const request = this.requests.get(id);
      request.tokens ??= choice.prompt_token_ids ?? chunk.prompt_token_ids ?? null;
      request.ids.push(...(choice.token_ids ?? []));
      request.text += choice.text ?? choice.delta?.content ?? "";
      own.know(id, { ...request, vocab });
    }
  }

  async end() {
    if (!this.requests.size) return;
    await tokens({ prompt: Array.from(this.requests.values(), ({ text }) => text).join("\n"), add_special_tokens: false });
    for (const [id, request] of this.requests) own.know(id, { ...request, vocab });
  }
}
