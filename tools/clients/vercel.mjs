// Checks of Vercel's AI SDK; check_vercel.py runs it.
import {createAnthropic} from "@ai-sdk/anthropic";
import {createOpenAI} from "@ai-sdk/openai";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
import {APICallError, embedMany, generateObject, generateText, Output, stepCountIs, streamText, tool} from "ai";
import {createOllama} from "ollama-ai-provider-v2";
import {z} from "zod";
import {assert, MODEL, rejection, run, URL} from "./checking.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false; // settings that a provider does not send
const baseURL = `${URL}/v1`;
const apiKey = "none";
const compatible = createOpenAICompatible({name: "octavo", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true});
const openai = createOpenAI({baseURL, apiKey});
const ollama = createOllama({baseURL: `${URL}/api`});
const models = {
  compatible: compatible(MODEL),
  chat: openai.chat(MODEL),
  responses: openai.responses(MODEL),
  anthropic: createAnthropic({baseURL, apiKey})(MODEL),
  ollama: ollama(MODEL),
};
const HELLO = "Hello there, and good day.";
const SUNNY = "It is sunny in Paris.";
const WEATHER = "How is the weather in Paris?";
const person = z.object({name: z.string(), is_tall: z.boolean()});
const fields = {maxRetries: 0, maxOutputTokens: 400};
let called = [];
const tools = {
  get_weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({city: z.string()}),
    execute: async ({city}) => { called.push(city); return {sky: "Sun"}; },
  }),
};

async function each(check) {
  for (const [name, model] of Object.entries(models)) await check(model, name);
}

await run({
  text: ["generateText by five models, with usage.", () => each(async (model, name) => {
    const {text, usage} = await generateText({...fields, model, prompt: "Hello.", system: "Be brief."});
    assert(text === HELLO && usage.outputTokens > 0, name, text, usage);
  })],
  settings: ["The settings that every model takes.", () => each(async (model, name) => {
    const settings = {temperature: 0.5, topP: 0.9, topK: 20, presencePenalty: 0.1, frequencyPenalty: 0.1, seed: 7, stopSequences: ["zzz"]};
    const {text} = await generateText({...fields, ...settings, model, prompt: "Hello."});
    assert(text === HELLO, name, text);
  })],
  stream: ["streamText: deltas that add up, with usage.", () => each(async (model, name) => {
    const result = streamText({...fields, model, prompt: "Hello."});
    let text = "";
    for await (const piece of result.textStream) text += piece;
    assert(text === HELLO && (await result.usage).outputTokens > 0, name, text, await result.usage);
  })],
  tools: ["A tool is called, its result answered, and a second question follows the messages.", () => each(async (model, name) => {
    called = [];
    const first = await generateText({...fields, model, tools, prompt: WEATHER, stopWhen: stepCountIs(3)});
    assert(called.join() === "Paris" && first.text === SUNNY && first.steps.length === 2, name, called, first.text);
    const messages = [{role: "user", content: WEATHER}, ...first.response.messages, {role: "user", content: "Hello."}];
    const second = await generateText({...fields, model, tools, messages});
    assert(second.text === HELLO, name, second.text);
  })],
  streamed_tools: ["The same, streamed.", () => each(async (model, name) => {
    called = [];
    const result = streamText({...fields, model, tools, prompt: WEATHER, stopWhen: stepCountIs(3)});
    let text = "";
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") text += part.text;
    }
    assert(called.join() === "Paris" && text === SUNNY, name, called, text);
    const messages = [{role: "user", content: WEATHER}, ...(await result.response).messages, {role: "user", content: "Hello."}];
    const second = await generateText({...fields, model, tools, messages});
    assert(second.text === HELLO, name, second.text);
  })],
  tool_choice: ["A named tool is called by the models whose provider can ask for it.", async () => {
    for (const name of ["compatible", "chat", "responses", "anthropic"]) {
      const choice = {type: "tool", toolName: "get_weather"};
      const {toolCalls} = await generateText({...fields, model: models[name], tools, prompt: WEATHER, toolChoice: choice});
      assert(toolCalls[0]?.input.city === "Paris", name, toolCalls);
    }
  }],
  object: ["generateObject and Output.object with a schema.", () => each(async (model, name) => {
    const {object} = await generateObject({...fields, model, schema: person, prompt: "Is anybody there?"});
    assert(object.name === "Ada" && object.is_tall, name, object);
    const {output} = await generateText({...fields, model, output: Output.object({schema: person}), prompt: "Is anybody there?"});
    assert(output.name === "Ada", name, output);
  })],
  embeddings: ["embedMany by three providers.", async () => {
    for (const model of [compatible.textEmbeddingModel(MODEL), openai.embedding(MODEL), ollama.embedding(MODEL)]) {
      const {embeddings} = await embedMany({model, values: ["a", "b"], maxRetries: 0});
      assert(embeddings.length === 2 && embeddings[0].length > 0, embeddings.length);
    }
  }],
  errors: ["A prompt that is too long is an APICallError that says so.", () => each(async (model, name) => {
    const error = await rejection(generateText({...fields, model, prompt: "hi ".repeat(60_000)}));
    assert(APICallError.isInstance(error) && error.statusCode === 400 && !error.isRetryable, name, error);
    assert(/maximum context length|prompt is too long/.test(error.responseBody), name, error.responseBody);
  })],
});
