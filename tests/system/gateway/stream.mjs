// Arguments MODEL and SEED: one answer whole and one as a stream, as a line of JSON.
import OpenAI from "openai";

const [model, seed] = process.argv.slice(2);
const client = new OpenAI({ maxRetries: 0 });
const request = {
  model,
  seed: Number(seed),
  max_tokens: 24,
  messages: [{ role: "user", content: "Once upon a time" }],
};
const whole = await client.chat.completions.create(request);
let streamed = "";
let chunks = 0;
for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  chunks += 1;
}
console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed, chunks }));
