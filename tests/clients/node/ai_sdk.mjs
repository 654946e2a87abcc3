// The AI SDK, with its provider of OpenAI-compatible servers and with that of OpenAI, whose default is /v1/responses.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { CITIES, QUESTION, getWeather, place, report } from "./subject.mjs";

const greedy = { prompt: QUESTION, temperature: 0, maxOutputTokens: 128, maxRetries: 0 };
const oneCall = { openai: { parallelToolCalls: false }, here: { parallel_tool_calls: false } };
const description = "Look up the weather of a city.";
const weather = tool({ description, inputSchema: place, execute: async (input) => getWeather(input) });
const tools = { getWeather: weather };

function compatible(server, name) {
  const options = { name: "here", includeUsage: true, supportsStructuredOutputs: true };
  return createOpenAICompatible({ ...options, ...server }).chatModel(name);
}

export async function generatesText(server, name) {
  const answer = await generateText({ ...greedy, model: compatible(server, name) });
  assert.ok(answer.text);
  assert.ok(["stop", "length"].includes(answer.finishReason));
  assert.ok(answer.usage.outputTokens > 0);
}

export async function streamsText(server, name) {
  const model = compatible(server, name);
  const stream = streamText({ ...greedy, model });
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, (await generateText({ ...greedy, model })).text);
  assert.ok((await stream.usage).outputTokens > 0);
}

export async function conversationGoesOn(server, name) {
  const { prompt, ...asked } = { ...greedy, model: compatible(server, name) };
  const messages = [{ role: "user", content: prompt }];
  const first = await generateText({ ...asked, messages });
  const more = [...messages, ...first.response.messages, { role: "user", content: "And in Rome?" }];
  assert.ok((await generateText({ ...asked, messages: more })).text);
}

export async function generatesObjects(server, name) {
  const model = compatible(server, name);
  report.parse((await generateObject({ ...greedy, model, schema: report })).object);
  report.parse((await generateText({ ...greedy, model, output: Output.object({ schema: report }) })).output);
}

export async function streamsObjects(server, name) {
  const stream = streamObject({ ...greedy, model: compatible(server, name), schema: report });
  let last;
  for await (const partial of stream.partialObjectStream) last = partial;
  assert.deepEqual(last, await stream.object);
}

export async function chooses(server, name) {
  const given = { ...greedy, model: compatible(server, name), output: Output.choice({ options: CITIES }) };
  assert.ok(CITIES.includes((await generateText(given)).output));
}

export async function callsTools(server, name) {
  const model = compatible(server, name);
  for (const toolChoice of ["required", { type: "tool", toolName: "getWeather" }]) {
    const answer = await generateText({ ...greedy, model, tools, toolChoice, providerOptions: oneCall });
    assert.ok(answer.toolCalls.length > 0);
    for (const call of answer.toolCalls) assert.ok(CITIES.includes(call.input.city) && !call.invalid);
    assert.ok(answer.toolResults.every((result) => result.output.includes("12 degrees")));
  }
}

export async function callsToolsInSteps(server, name) {
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const asked = { ...greedy, providerOptions: oneCall, tools, prepareStep, stopWhen: stepCountIs(3) };
  const given = { ...asked, model: compatible(server, name) };
  const answer = await generateText(given);
  assert.equal(answer.steps.length, 2);
  assert.ok(answer.text);
  const stream = streamText(given);
  assert.equal(await stream.text, answer.text);
  assert.equal((await stream.steps).length, 2);
}

export async function responsesEndpoint(server, name) {
  const model = createOpenAI(server)(name);
  const answer = await generateText({ ...greedy, model });
  assert.ok(answer.text);
  assert.equal(await streamText({ ...greedy, model }).text, answer.text);
  report.parse((await generateObject({ ...greedy, model, schema: report })).object);
}

export async function responsesEndpointWithTools(server, name) {
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const asked = { ...greedy, providerOptions: oneCall, tools, prepareStep, stopWhen: stepCountIs(3) };
  const answer = await generateText({ ...asked, model: createOpenAI(server)(name) });
  assert.equal(answer.steps.length, 2);
  assert.ok(answer.text);
}

export async function errorsAreTyped(server, name) {
  const model = compatible(server, name);
  await assert.rejects(generateText({ ...greedy, model, topP: -1 }), (error) => {
    return APICallError.isInstance(error) && error.statusCode === 400 && error.message.includes("top_p");
  });
  await assert.rejects(generateText({ ...greedy, model: compatible({ ...server, apiKey: "sk-wrong" }, name) }), (error) => {
    return error.statusCode === 401;
  });
}
