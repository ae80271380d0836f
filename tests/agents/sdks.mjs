// Sessions of three turns by way of released SDKs: `sdks.mjs KIND URL MODEL`, KIND as below.
// Prints a line of JSON for each turn: its name and its text.

import { readFileSync, writeFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodOutputFormat, betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { isStepCount, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [kind, url, model] = process.argv.slice(2);
const PICTURE = readFileSync("red.png").toString("base64");
const Colours = z.object({ colours: z.array(z.string()) });
const City = z.object({ city: z.string() });
const Text = z.object({ text: z.string() });
const Nothing = z.object({});

function weather({ city }) {
  return `${city}: ${city === "Oslo" ? 3 : 20} degrees, says ${kind}`;
}

function save({ text }) {
  writeFileSync("saved.txt", text);
  return `saved for ${kind}`;
}

const tools = [
  { name: "get_weather", description: "Weather of a city", schema: City, run: weather },
  { name: "save", description: "Saves a text", schema: Text, run: save },
];
const look = { name: "look", description: "Takes a picture", schema: Nothing };

// Each kind makes a session, whose `turn` returns the text of the whole turn and whose `parse`
// returns an object, then goes on with it in the history.

function openaiChat() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  let messages = [{ role: "system", content: "Be brief." }];
  return {
    async turn(content) {
      const runner = client.chat.completions.runTools({
        model,
        stream: true,
        messages: [...messages, { role: "user", content }],
        tools: tools.map(({ name, description, schema, run }) =>
          zodFunction({ name, description, parameters: schema, function: run }),
        ),
      });
      const text = await runner.finalContent();
      messages = runner.messages;
      return text;
    },
    async parse(content) {
      messages.push({ role: "user", content });
      const completion = await client.chat.completions.parse({
        model,
        messages,
        response_format: zodResponseFormat(Colours, "colours"),
      });
      messages.push(completion.choices[0].message);
      return completion.choices[0].message.parsed;
    },
  };
}

function openaiResponses() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const runs = { look: () => [
    { type: "input_image", image_url: `data:image/png;base64,${PICTURE}`, detail: "auto" },
    { type: "input_text", text: `looked for ${kind}` },
  ] };
  for (const { name, run } of tools) runs[name] = run;
  const declared = [...tools, look].map(({ name, description, schema }) => ({
    type: "function",
    name,
    description,
    strict: true,
    parameters: z.toJSONSchema(schema),
  }));
  const input = [{ role: "developer", content: "Be brief." }];
  return {
    async turn(content) {
      input.push({ role: "user", content });
      for (;;) {
        const stream = client.responses.stream({
          model,
          instructions: "Answer.",
          input,
          store: false,
          tools: declared,
        });
        const response = await stream.finalResponse();
        input.push(...response.output);
        const calls = response.output.filter((item) => item.type === "function_call");
        if (calls.length === 0) return response.output_text;
        for (const call of calls) {
          const output = runs[call.name](JSON.parse(call.arguments));
          input.push({ type: "function_call_output", call_id: call.call_id, output });
        }
      }
    },
    async parse(content) {
      input.push({ role: "user", content });
      const response = await client.responses.parse({
        model,
        input,
        text: { format: zodTextFormat(Colours, "colours") },
      });
      input.push(...response.output);
      return response.output_parsed;
    },
  };
}

function anthropicMessages() {
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const messages = [];
  const runnable = tools.map(({ name, description, schema, run }) =>
    betaZodTool({ name, description, inputSchema: schema, run }),
  );
  runnable.push(
    betaZodTool({
      name: look.name,
      description: look.description,
      inputSchema: look.schema,
      run: () => [
        { type: "image", source: { type: "base64", media_type: "image/png", data: PICTURE } },
        { type: "text", text: `looked for ${kind}` },
      ],
    }),
  );
  return {
    async turn(content) {
      const runner = client.beta.messages.toolRunner({
        model,
        max_tokens: 1000,
        stream: true,
        system: "Be brief.",
        messages: [...messages, { role: "user", content }],
        tools: runnable,
      });
      let last;
      for await (const stream of runner) last = await stream.finalMessage();
      messages.splice(0, messages.length, ...runner.params.messages);
      if (messages.at(-1).role !== "assistant")
        messages.push({ role: "assistant", content: last.content });
      return last.content.map((block) => block.text ?? "").join("");
    },
    async parse(content) {
      messages.push({ role: "user", content });
      const message = await client.beta.messages.parse({
        model,
        max_tokens: 1000,
        messages,
        output_format: betaZodOutputFormat(Colours),
      });
      messages.push({ role: "assistant", content: message.content });
      return message.parsed_output;
    },
  };
}

function ai(languageModel, providerOptions) {
  const declared = Object.fromEntries(
    tools.map(({ name, description, schema, run }) => [
      name,
      tool({ description, inputSchema: schema, execute: async (input) => run(input) }),
    ]),
  );
  declared.look = tool({
    description: look.description,
    inputSchema: look.schema,
    execute: async () => `looked for ${kind}`,
    toModelOutput: ({ output }) => ({
      type: "content",
      value: [
        { type: "file", mediaType: "image/png", data: { type: "data", data: PICTURE } },
        { type: "text", text: output },
      ],
    }),
  });
  const messages = [];
  async function steps(content, options) {
    messages.push({ role: "user", content });
    let failure;
    const result = streamText({
      model: languageModel,
      instructions: "Be brief.",
      messages,
      maxRetries: 0,
      providerOptions,
      onError: ({ error }) => {
        failure = error;
      },
      ...options,
    });
    await result.consumeStream();
    if (failure) throw failure;
    messages.push(...(await result.responseMessages));
    return result;
  }
  return {
    async turn(content) {
      return (await steps(content, { tools: declared, stopWhen: isStepCount(9) })).text;
    },
    async parse(content) {
      return (await steps(content, { output: Output.object({ schema: Colours }) })).output;
    },
  };
}

const openai = () => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const kinds = {
  "openai-chat": openaiChat,
  "openai-responses": openaiResponses,
  "anthropic-messages": anthropicMessages,
  "ai-openai-chat": () => ai(openai().chat(model)),
  "ai-openai-responses": () => ai(openai()(model), { openai: { store: false } }),
  "ai-openai-stored": () => ai(openai()(model)),
  "ai-anthropic": () =>
    ai(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model)),
  "ai-openai-compatible": () =>
    ai(createOpenAICompatible({ name: "mayfly", baseURL: `${url}/v1` })(model)),
};

const session = kinds[kind]();
const turns = {
  weather: () => session.turn("[weather] Compare the two, and save it."),
  colours: async () => JSON.stringify(await session.parse(`[colours, ${kind}] Name some.`)),
  look: () => session.turn("[look] at it"),
  goodbye: () => session.turn("[goodbye]"),
  overflow: () => session.turn("word ".repeat(300_000)),
};
if (kind === "openai-chat") delete turns.look; // its tools answer with text alone
for (const [name, turn] of Object.entries(turns)) {
  try {
    console.log(JSON.stringify({ type: name, text: await turn() }));
  } catch (error) {
    const { status, statusCode, code, message, responseBody } = error;
    const body = error.error ?? responseBody;
    console.log(
      JSON.stringify({ type: name, error: message, status: status ?? statusCode, code, body }),
    );
  }
}
