// The official client for Node: create, stream, parse, runTools, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { CITIES, QUESTION, getWeather, place, report } from "./subject.mjs";

const messages = [{ role: "user", content: QUESTION }];
const weather = { name: "get_weather", parameters: place, description: "Look up the weather of a city." };

function connected(server, model) {
  return [new OpenAI({ ...server, maxRetries: 0 }), { model, messages, temperature: 0, max_tokens: 128 }];
}

export async function create(server, model) {
  const [client, asked] = connected(server, model);
  const answer = await client.chat.completions.create(asked);
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
}

export async function streamed(server, model) {
  const [client, asked] = connected(server, model);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(text, (await client.chat.completions.create(asked)).choices[0].message.content);
}

export async function streamHelper(server, model) {
  const [client, asked] = connected(server, model);
  const stream = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, final.choices[0].message.content);
  assert.ok(final.usage.completion_tokens > 0);
  const more = [...messages, final.choices[0].message, { role: "user", content: "And in Rome?" }];
  assert.ok((await client.chat.completions.create({ ...asked, messages: more })).choices[0].message.content);
}

export async function parse(server, model) {
  const [client, asked] = connected(server, model);
  const answer = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(report, "report") });
  assert.deepEqual(report.parse(answer.choices[0].message.parsed), answer.choices[0].message.parsed);
}

export async function parseStreamed(server, model) {
  const [client, asked] = connected(server, model);
  const format = zodResponseFormat(report, "report");
  const final = await client.chat.completions.stream({ ...asked, response_format: format }).finalChatCompletion();
  report.parse(final.choices[0].message.parsed);
}

export async function parseTools(server, model) {
  const [client, asked] = connected(server, model);
  const given = { ...asked, tools: [zodFunction(weather)], tool_choice: "required", parallel_tool_calls: false };
  const { message, finish_reason } = (await client.chat.completions.parse(given)).choices[0];
  assert.ok(message.tool_calls.length > 0);
  for (const call of message.tool_calls) assert.ok(CITIES.includes(call.function.parsed_arguments.city));
  assert.equal(finish_reason, "tool_calls");
}

export async function toolsStreamed(server, model) {
  const [client, asked] = connected(server, model);
  const given = { ...asked, tools: [zodFunction(weather)], tool_choice: "required", parallel_tool_calls: false };
  const final = await client.chat.completions.stream(given).finalChatCompletion();
  const whole = await client.chat.completions.parse(given);
  const calls = (answer) => answer.choices[0].message.tool_calls.map((call) => call.function.arguments);
  assert.deepEqual(calls(final), calls(whole));
}

export async function runTools(server, model) {
  const [client, asked] = connected(server, model);
  const called = [];
  const tool = zodFunction({ ...weather, function: (args) => (called.push(args), getWeather(args)) });
  const choice = { type: "function", function: { name: "get_weather" } };
  const runner = client.chat.completions.runTools({ ...asked, tools: [tool], tool_choice: choice });
  await runner.done();
  assert.equal(called.length, 1);
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content.includes("12 degrees")));
}

export async function runToolsToTheAnswer(server, model) {
  const [client, asked] = connected(server, model);
  const tool = zodFunction({ ...weather, function: getWeather });
  const runner = client.chat.completions.runTools({ ...asked, tools: [tool] }, { maxChatCompletions: 3 });
  assert.ok((await runner.finalChatCompletion()).choices[0].finish_reason);
}

export async function responses(server, model) {
  const [client] = connected(server, model);
  const asked = { model, input: QUESTION, temperature: 0, max_output_tokens: 128 };
  const answer = await client.responses.create(asked);
  let text = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, answer.output_text);
  const parsed = await client.responses.parse({ ...asked, text: { format: zodTextFormat(report, "report") } });
  report.parse(parsed.output_parsed);
}

export async function errorsAreTyped(server, model) {
  const [client, asked] = connected(server, model);
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ ...asked, model: "another" }), OpenAI.NotFoundError);
  const wrong = new OpenAI({ ...server, apiKey: "sk-wrong", maxRetries: 0 });
  await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
}
