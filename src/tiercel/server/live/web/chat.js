// A conversation with the model: under each answer, where the tokens of its prompt came from.

import { bearer, events, keys, problem } from "./feed.js";
import { bar } from "./requests.js";
import { $, capital, make, PARTS, seconds, short } from "./words.js";

let messages = [];
let asking = null;

function facts() {
  const records = { king: "sword", night: "dark", silver: "gold", fire: "water" };
  const text = Object.entries(records).map(([key, value]) => `Record: ${key} ${value}.\n`).join("");
  return `${text.repeat(8)}Which record has fire?`;
}

$("example").addEventListener("click", () => {
  $("message").value = messages.length ? "Which record has silver?" : facts();
  $("message").focus();
});

$("again").addEventListener("click", () => {
  asking?.abort();
  messages = [];
  $("turns").replaceChildren();
});

$("stop").addEventListener("click", () => asking?.abort());

$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat").requestSubmit();
  }
});

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || asking) return;
  $("message").value = "";
  say(text);
});

function show(...nodes) {
  $("turns").append(...nodes);
  $("turns").scrollTop = $("turns").scrollHeight;
}

async function say(text) {
  const conversation = messages;
  const answer = make("p", { className: "answer" });
  conversation.push({ role: "user", content: text });
  show(make("p", { className: "question" }, text), answer);
  asking = new AbortController();
  $("send").disabled = true;
  $("stop").hidden = false;
  try {
    conversation.push({ role: "assistant", content: await stream(conversation, answer, asking.signal) });
  } catch (error) {
    conversation.pop();
    if (error instanceof NeedsKey) return askUserKey(text, answer, error.message);
    answer.className = "answer failed";
    const why = error.name === "AbortError" ? "(stopped)" : `The request failed: ${error.message}`;
    answer.textContent = `${answer.textContent} ${why}`.trim();
  } finally {
    asking = null;
    $("send").disabled = false;
    $("stop").hidden = true;
  }
}

class NeedsKey extends Error {}

// The admin key opens the feed; answers may need an API key.
function askUserKey(text, answer, why) {
  const field = make("input", { type: "password", id: "user-key", autocomplete: "off", required: "" });
  const form = make("form", { className: "ask-key" },
    make("label", { for: "user-key" }, `API key for answers (${why})`),
    make("div", { className: "line" }, field, make("button", { type: "submit" }, "Send")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keys.user = field.value.trim();
    form.previousSibling.remove(); // the question is shown again with its answer
    form.remove();
    say(text);
  });
  answer.replaceWith(form);
  field.focus();
}

async function stream(conversation, answer, signal) {
  const started = performance.now();
  let first = null;
  let text = "";
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...bearer(keys.user) },
    body: JSON.stringify({
      messages: conversation,
      stream: true,
      temperature: 0,
      max_tokens: 256,
      stream_options: { include_usage: true },
      return_cached_tokens_details: true,
    }),
  });
  if (response.status === 401) throw new NeedsKey(await problem(response));
  if (!response.ok) throw new Error(await problem(response));
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    first ??= performance.now();
    const delta = event.choices[0]?.delta ?? {};
    text += delta.content ?? "";
    const more = (delta.reasoning_content ?? "") + (delta.content ?? "");
    answer.append(answer.textContent ? more : more.trimStart());
    if (event.usage) show(source(event, (first - started) / 1000));
    $("turns").scrollTop = $("turns").scrollHeight;
  }
  return text;
}

// Under an answer: where the tokens of its prompt came from, and on a click why not more.
function source({ id, usage, sglext }, firstSeconds) {
  const { device, host, storage } = sglext.cached_tokens_details;
  const replayed = sglext.replayed_tokens;
  const computed = usage.prompt_tokens - device - host - storage - replayed;
  const tokens = { device, host, store: storage, replayed, computed };
  const words = PARTS.filter((name) => tokens[name])
    .map((name) => make("span", { className: `word ${name}` }, `${short(tokens[name])} ${name}`));
  const took = make("span", { className: "quiet" }, `first token after ${seconds(firstSeconds)}`);
  const why = make("p", { className: "quiet" }, "…");
  const details = make("details", { className: "source" },
    make("summary", {}, bar(tokens), make("span", { className: "words" }, ...words, took)),
    why);
  for (const name of PARTS) details.dataset[name] = tokens[name];
  details.addEventListener("toggle", async () => {
    const response = await fetch(`v1/cache/explain/${id}`, { headers: bearer(keys.user) });
    why.textContent = `${capital(response.ok ? (await response.json()).summary : await problem(response))}.`;
    const hidden = details.getBoundingClientRect().bottom - $("turns").getBoundingClientRect().bottom;
    if (hidden > 0) $("turns").scrollTop += hidden;
  }, { once: true });
  return details;
}
