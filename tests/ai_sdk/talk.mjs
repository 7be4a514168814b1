// What users of the AI SDK do, in one process: node talk.mjs URL. It prints a JSON list: for each task what came of
// it, and the bodies of the requests that the SDK sent.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const sent = [];
const openai = createOpenAI({
  baseURL: process.argv.at(-1),
  apiKey: "none",
  fetch: (url, options) => {
    sent.push({ path: new URL(url).pathname, body: JSON.parse(options.body) });
    return fetch(url, options);
  },
});
const model = openai("scripted");
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string(), days: z.number() }),
  execute: async ({ city }) => ({ city, sky: "clear" }),
});
const clock = tool({ description: "The time", inputSchema: z.object({}), execute: async () => "noon" });
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
  generateObject: () =>
    generateObject({ model, schema: z.object({ city: z.string(), days: z.number() }), prompt: "Weather?", maxRetries: 0 }),
};

const told = [];
for (const [name, task] of Object.entries(tasks)) {
  sent.length = 0;
  let outcome;
  try {
    const { text, reasoningText, steps, usage, finishReason, pieces, object } = await task();
    const calls = steps?.flatMap((step) => step.toolCalls.map(({ toolName, input }) => ({ toolName, input })));
    outcome = { text, reasoningText, calls, usage, finishReason, pieces, object };
  } catch (error) {
    outcome = { error: error.message, status: error.statusCode };
  }
  told.push({ name, outcome, sent: [...sent] });
}
console.log(JSON.stringify(told));
