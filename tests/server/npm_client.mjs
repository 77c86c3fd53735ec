// npm's `openai` client at a server: node npm_client.mjs PACKAGE BASE_URL. Prints what it saw as JSON.
import { pathToFileURL } from "node:url";

const [, , entry, baseURL] = process.argv;
const { default: OpenAI } = await import(pathToFileURL(entry));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 30000 });
const prompt = "w5 w6 w7 w8 w9 w10 w11 w12 w13";
const messages = [{ role: "user", content: prompt }];
const wanted = { model: "tiny", messages, max_completion_tokens: 4, temperature: 0 };
const seen = {};

seen.models = (await client.models.list()).data.map((model) => model.id);
seen.completion = await client.completions.create({ model: "tiny", prompt, max_tokens: 4, temperature: 0, cache_salt: "js" });
seen.again = await client.completions.create({ model: "tiny", prompt, max_tokens: 4, temperature: 0, cache_salt: "js" });
seen.chat = await client.chat.completions.create(wanted);

const stream = await client.chat.completions.create({ ...wanted, stream: true, stream_options: { include_usage: true } });
seen.streamed = { text: "", usage: null };
for await (const part of stream) {
  seen.streamed.text += part.choices[0]?.delta?.content ?? "";
  seen.streamed.usage = part.usage ?? seen.streamed.usage;
}

const response = await client.responses.create({ model: "tiny", input: prompt, max_output_tokens: 4, temperature: 0 });
seen.response = response.output_text;
seen.responseStream = "";
for await (const event of await client.responses.create({ model: "tiny", input: prompt, max_output_tokens: 4, temperature: 0, stream: true }))
  if (event.type === "response.output_text.delta") seen.responseStream += event.delta;

const left = await client.completions.create({ model: "tiny", prompt, max_tokens: 400, stream: true, ignore_eos: true });
for await (const _ of left) break; // leaving the loop closes the connection

try {
  await client.completions.create({ model: "huge", prompt });
} catch (problem) {
  seen.refused = { kind: problem.constructor.name, status: problem.status, code: problem.code, id: problem.requestID };
}
console.log(JSON.stringify(seen));
