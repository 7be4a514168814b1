// The feed of the server: what it sends becomes the state, which is drawn. And the keys that it asks for.

import { $, capital } from "./words.js";

const RETRY_MS = 2000;
export const keys = { admin: "", user: "" };
export const state = {};
let skewMs = 0; // the browser's clock minus the server's

// The server's clock.
export const nowS = () => (Date.now() - skewMs) / 1000;

function patch(into, change) {
  for (const [name, value] of Object.entries(change)) {
    if (value === null) delete into[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      if (typeof into[name] !== "object") into[name] = {};
      patch(into[name], value);
    } else into[name] = value;
  }
  return into;
}

export const bearer = (key) => (key ? { authorization: `Bearer ${key}` } : {});

export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Yields the data of server-sent events. EventSource can not send a key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

function tell(kind, text) {
  if ($("state").textContent === text) return;
  $("state").dataset.state = kind;
  $("state").textContent = text;
}

// Returns why the feed ended: "key", "refused" or "gone".
async function follow(draw) {
  const response = await fetch("feed", { headers: bearer(keys.admin), cache: "no-store" });
  if (!response.ok) {
    const why = await problem(response);
    if (response.status === 401) {
      $("key-name").textContent = capital(why.match(/the (.+) is missing/)?.[1] ?? "key");
      $("ask-key-why").textContent = keys.admin ? `${capital(why)}.` : "";
    }
    tell("off", response.status === 401 ? "a key is needed" : why);
    return { 401: "key", 403: "refused" }[response.status] ?? "gone";
  }
  for (const name of Object.keys(state)) delete state[name];
  for await (const data of events(response)) {
    const change = JSON.parse(data);
    if (change.now_s) skewMs = Date.now() - 1000 * change.now_s;
    patch(state, change);
    draw();
    tell("on", "live");
  }
  return "gone";
}

export async function run(draw) {
  let why = "gone";
  try {
    why = await follow(draw);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a TypeError is a network that failed
  }
  if (why === "gone") {
    if ($("state").dataset.state === "on") tell("wait", "connecting again");
    setTimeout(run, RETRY_MS, draw);
  } else if (why === "key") {
    askKey(draw);
  }
}

function askKey(draw) {
  $("ask-key").hidden = false;
  $("key").focus();
  $("ask-key").addEventListener("submit", (event) => {
    event.preventDefault();
    keys.admin = $("key").value.trim();
    keys.user ||= keys.admin;
    $("key").value = "";
    $("ask-key").hidden = true;
    run(draw);
  }, { once: true });
}
