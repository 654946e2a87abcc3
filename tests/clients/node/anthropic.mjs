// Anthropic's client for Node: create, stream, tools, its tool runner, errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { CITIES, QUESTION, getWeather, place } from "./subject.mjs";

const messages = [{ role: "user", content: QUESTION }];
const weather = {
  name: "get_weather",
  description: "Look up the weather of a city.",
  input_schema: { type: "object", properties: { city: { enum: CITIES } }, required: ["city"], additionalProperties: false },
};
const tool_choice = { type: "any", disable_parallel_tool_use: true };

function connected(server, model) {
  const client = new Anthropic({ baseURL: server.baseURL.replace(/\/v1$/, ""), apiKey: server.apiKey, maxRetries: 0 });
  return [client, { model, messages, temperature: 0, max_tokens: 128 }];
}

export async function create(server, model) {
  const [client, asked] = connected(server, model);
  const answer = await client.messages.create({ ...asked, system: "Be brief." });
  assert.ok(answer.content[0].text);
  assert.ok(answer.usage.output_tokens > 0);
}

export async function streamed(server, model) {
  const [client, asked] = connected(server, model);
  let text = "";
  const stream = client.messages.stream(asked).on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, final.content[0].text);
  assert.equal(text, (await client.messages.create(asked)).content[0].text);
}

export async function calls(server, model) {
  const [client, asked] = connected(server, model);
  const final = await client.messages.stream({ ...asked, tools: [weather], tool_choice }).finalMessage();
  const [call] = final.content;
  assert.equal(final.stop_reason, "tool_use");
  assert.ok(CITIES.includes(call.input.city));
  const result = { type: "tool_result", tool_use_id: call.id, content: getWeather(call.input) };
  const more = [...messages, { role: "assistant", content: final.content }, { role: "user", content: [result] }];
  assert.ok((await client.messages.create({ ...asked, messages: more, tools: [weather] })).content.length);
}

export async function toolRunner(server, model) {
  const [client, asked] = connected(server, model);
  const seen = [];
  const run = (input) => (seen.push(input.city), getWeather(input));
  const tool = betaZodTool({ name: "get_weather", description: weather.description, inputSchema: place, run });
  const runner = client.beta.messages.toolRunner({ ...asked, tools: [tool], tool_choice, max_iterations: 2 });
  let answers = 0;
  for await (const _ of runner) answers += 1;
  assert.equal(answers, 2);
  assert.ok(seen.length && seen.every((city) => CITIES.includes(city)));
}

export async function errors(server, model) {
  const [client, asked] = connected(server, model);
  await assert.rejects(client.messages.create({ ...asked, model: "other" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...asked, messages: [] }), Anthropic.BadRequestError);
}
