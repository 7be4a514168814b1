// What users of the AI SDK do, in one process: node talk.mjs URL MODEL [TASK …]. It prints a JSON list: for each task
// what came of it, and the bodies of the requests that the SDK sent.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, modelName, ...wanted] = process.argv.slice(process.argv.findIndex((each) => each.startsWith("http")));
globalThis.AI_SDK_LOG_WARNINGS = false;
const sent = [];
const openai = createOpenAI({
  baseURL: url,
  apiKey: "none",
  fetch: (url, options) => {
    sent.push({ path: new URL(url).pathname, body: JSON.parse(options.body) });
    return fetch(url, options);
  },
});
const model = openai(modelName);
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string(), days: z.number() }),
  execute: async ({ city }) => ({ city, sky: "clear" }),
});
const clock = tool({ description: "The time", inputSchema: z.object({}), execute: async () => "noon" });
const city = z.object({ name: z.string().max(8), days: z.int().min(1).max(9), sky: z.enum(["clear", "grey"]) });
const thoughts = { openai: { store: false, forceReasoning: true, reasoningSummary: "auto" } };

const tasks = {
  generateText: () => generateText({ model, system: "Be brief.", prompt: "Weather?", temperature: 0, maxRetries: 0 }),
  streamText: async () => {
    const stream = streamText({ model, prompt: "Weather?", maxOutputTokens: 64, providerOptions: thoughts, maxRetries: 0 });
    let pieces = 0;
    for await (const piece of stream.textStream) pieces += piece.length > 0;
    return {
      pieces,
      text: await stream.text,
      reasoningText: await stream.reasoningText,
      usage: await stream.usage,
      finishReason: await stream.finishReason,
    };
  },
  tools: () =>
    generateText({
      model,
      prompt: "Weather?",
      tools: { weather, clock },
      stopWhen: stepCountIs(2),
      providerOptions: thoughts,
      maxRetries: 0,
    }),
  streamTools: async () => {
    const stream = streamText({
      model,
      prompt: "Weather?",
      tools: { weather, clock },
      stopWhen: stepCountIs(2),
      providerOptions: { openai: { store: false } },
      maxRetries: 0,
    });
    await stream.consumeStream();
    return { text: await stream.text, steps: await stream.steps, finishReason: await stream.finishReason };
  },
  conversation: async () => {
    const messages = [];
    const turns = [];
    for (const content of ["Hello?", "Weather?", "Thanks"]) {
      messages.push({ role: "user", content });
      const tools = { weather, clock };
      const answer = await generateText({ model, messages, tools, stopWhen: stepCountIs(2), maxRetries: 0 });
      messages.push(...answer.response.messages);
      turns.push(answer);
    }
    return { text: turns.map(({ text }) => text).join(" | "), steps: turns.flatMap(({ steps }) => steps) };
  },
  generateObject: () => generateObject({ model, schema: city, prompt: "Which city?", temperature: 0, maxRetries: 0 }),
  outputObject: async () => {
    const output = Output.object({ schema: city });
    const answer = await generateText({ model, output, prompt: "Which city?", temperature: 0, maxRetries: 0 });
    return { object: answer.output };
  },
};

const told = [];
for (const name of wanted.length ? wanted : Object.keys(tasks)) {
  sent.length = 0;
  let outcome;
  try {
    const { text, reasoningText, steps, usage, finishReason, pieces, object } = await tasks[name]();
    const calls = steps?.flatMap((step) => step.toolCalls.map(({ toolName, input }) => ({ toolName, input })));
    outcome = { text, reasoningText, calls, usage, finishReason, pieces, object };
  } catch (error) {
    outcome = { error: error.message, status: error.statusCode };
  }
  told.push({ name, outcome, sent: [...sent] });
}
console.log(JSON.stringify(told));
