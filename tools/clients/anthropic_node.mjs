// Checks of @anthropic-ai/sdk; check_anthropic_node.py runs it.
import Anthropic from "@anthropic-ai/sdk";
import {betaZodTool} from "@anthropic-ai/sdk/helpers/beta/zod";
import {zodOutputFormat} from "@anthropic-ai/sdk/helpers/zod";
import * as z from "zod/v4";
import {assert, MODEL, rejection, run, URL} from "./checking.mjs";

const client = new Anthropic({baseURL: URL, apiKey: "none", maxRetries: 0, timeout: 120_000});
const HELLO = "Hello there, and good day.";
const SUNNY = "It is sunny in Paris.";
const ASK = [{role: "user", content: "Hello."}];
const WEATHER = [{role: "user", content: "How is the weather in Paris?"}];
const fields = {model: MODEL, max_tokens: 400};
let called = [];
const tool = betaZodTool({
  name: "get_weather",
  description: "The weather in a city",
  inputSchema: z.object({city: z.string()}),
  run: ({city}) => { called.push(city); return "Sun"; },
});

await run({
  message: ["A message with its usage.", async () => {
    const message = await client.messages.create({...fields, messages: ASK});
    assert(message.content[0].text === HELLO && message.usage.output_tokens > 0, message);
  }],
  stream: ["The stream helper accumulates the same message.", async () => {
    const stream = client.messages.stream({...fields, messages: ASK});
    let text = "";
    stream.on("text", (piece) => { text += piece; });
    const final = await stream.finalMessage();
    assert(text === HELLO && final.content[0].text === HELLO, text, final);
  }],
  tool_runner: ["toolRunner: the tool is called once, and its result is answered.", async () => {
    called = [];
    const final = await client.beta.messages.toolRunner({...fields, messages: WEATHER, tools: [tool]});
    assert(called.join() === "Paris" && final.content.at(-1).text === SUNNY, called, final);
  }],
  streamed_tool_runner: ["toolRunner with stream: events of two turns.", async () => {
    called = [];
    const finals = [];
    for await (const stream of client.beta.messages.toolRunner({...fields, messages: WEATHER, tools: [tool], stream: true})) {
      for await (const event of stream) assert(event.type, event);
      finals.push(await stream.finalMessage());
    }
    assert(called.join() === "Paris" && finals.length === 2 && finals[1].content.at(-1).text === SUNNY, finals);
  }],
  history: ["A second question after the first run's messages.", async () => {
    const runner = client.beta.messages.toolRunner({...fields, messages: WEATHER, tools: [tool]});
    await runner.runUntilDone();
    const again = await client.beta.messages.toolRunner({...fields, messages: [...runner.params.messages, ...ASK], tools: [tool]});
    assert(again.content.at(-1).text === HELLO, again);
  }],
  structured: ["messages.parse with a zod schema.", async () => {
    const person = z.object({name: z.string(), is_tall: z.boolean()});
    const ask = [{role: "user", content: "Is anybody there?"}];
    const message = await client.messages.parse({...fields, messages: ask, output_config: {format: zodOutputFormat(person)}});
    assert(message.parsed_output.name === "Ada" && message.parsed_output.is_tall, message);
  }],
  errors: ["A prompt that is too long and a mistake are BadRequestError.", async () => {
    const long = [{role: "user", content: "hi ".repeat(60_000)}];
    const tooLong = await rejection(client.messages.create({...fields, messages: long}));
    assert(tooLong instanceof Anthropic.BadRequestError && tooLong.message.includes("prompt is too long"), tooLong);
    const unknown = await rejection(client.messages.create({...fields, model: "no-such-model", messages: ASK}));
    assert(unknown instanceof Anthropic.NotFoundError, unknown);
  }],
});
