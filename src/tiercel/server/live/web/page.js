// The page: reads `feed`, keeps the state, draws it. Plain DOM, no library.

const SOURCES = ["device", "host", "store", "computed"];
const PARTS = ["device", "host", "store", "replayed", "computed"]; // replayed: found, and computed again
const SVG = "http://www.w3.org/2000/svg";
const RETRY_MS = 2000;
const keys = { admin: "", user: "" };
let state = {};
let skewMs = 0; // the browser's clock minus the server's

const $ = (id) => document.getElementById(id);

function make(tag, props = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name === "className" ? "class" : name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// Numbers as words

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = (number) => grouped.format(number ?? 0);

function bytes(number) {
  if (!number) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(number) / 10));
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"][power];
  const value = number / 1024 ** power;
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 0.0995) return `${(number * 1000).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 60) return `${number.toFixed(number < 10 ? 2 : 1)} s`;
  if (number < 3600) return `${(number / 60).toFixed(1)} min`;
  return `${(number / 3600).toFixed(1)} h`;
}

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const plural = (count, word) => `${short(count)} ${word}${count === 1 ? "" : "s"}`;
const sum = (numbers) => Object.values(numbers ?? {}).reduce((total, number) => total + number, 0);

// One number that /metrics has too. Its tooltip names the metric.
function metric(node, name, value, text) {
  node.dataset.metric = name;
  node.dataset.value = value;
  node.title = `${name} = ${value}`;
  if (node.textContent !== text) node.textContent = text;
}

// The feed

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

const bearer = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// Yields the data of server-sent events. EventSource can not send a key.
async function* events(response) {
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
async function follow() {
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
  state = {};
  for await (const data of events(response)) {
    const change = JSON.parse(data);
    if (change.now_s) skewMs = Date.now() - 1000 * change.now_s;
    patch(state, change);
    draw();
    tell("on", "live");
  }
  return "gone";
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

async function run() {
  let why = "gone";
  try {
    why = await follow();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a TypeError is a network that failed
  }
  if (why === "gone") {
    if ($("state").dataset.state === "on") tell("wait", "connecting again");
    setTimeout(run, RETRY_MS);
  } else if (why === "key") {
    $("ask-key").hidden = false;
    $("key").focus();
  }
}

$("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.admin = $("key").value.trim();
  keys.user ||= keys.admin;
  $("key").value = "";
  $("ask-key").hidden = true;
  run();
});

// Drawing

function draw() {
  const { stats, server } = state;
  $("all").hidden = false;
  $("model").textContent = server.model;
  $("version").textContent = `tiercel ${server.version}, pages of ${server.page_tokens} tokens`;
  drawSaved(stats);
  for (const tier of ["device", "host"]) drawMemory(tier, stats);
  drawStore(stats);
  drawCharts();
  drawRequests();
}

function drawSaved({ hit_tokens: hits, counters, compute_saved_s: spared, compute_tokens_s: rate, queue }) {
  const asked = counters.tokens_asked ?? 0;
  const saved = sum(hits);
  const replayed = counters.tokens_replayed ?? 0;
  $("saved-tokens").textContent = short(saved);
  $("saved-tokens").dataset.value = saved;
  $("saved-share").textContent = percent(saved, asked);
  if (rate) metric($("saved-time"), "tiercel_compute_saved_seconds_total", spared, seconds(spared));
  else $("saved-time").textContent = "–";
  metric($("replayed"), "tiercel_tokens_replayed_total", replayed, short(replayed));
  metric($("asked"), "tiercel_tokens_asked_total", asked, short(asked));
  $("estimate").textContent = rate
    ? "The time is an estimate: each request adds the tokens that it reused, divided by the speed at which prompts were computed when it began."
    : "No time is estimated yet: no prompt was computed since the start.";
  metric($("running"), "tiercel_queue_running", queue.running, short(queue.running));
  metric($("waiting"), "tiercel_queue_waiting", queue.waiting, `${short(queue.waiting)} wait`);
}

// A tier's card is made once; after that only numbers and widths change, so that widths move softly.
function card(tier, names) {
  const root = $(`tier-${tier}`);
  if (root.dataset.names === names.join()) return root;
  root.dataset.names = names.join();
  root.replaceChildren(
    make("h2", {}, capital(tier), make("small", { "data-part": "note" })),
    make("p", { className: "amount" }, make("b", { "data-part": "used" }), " ", make("span", { "data-part": "of" })),
    make("div", { className: "bar", role: "img", "data-part": "bar" },
      ...names.map((name) => make("i", { "data-stream": name }))),
    make("dl", { "data-part": "list" }),
  );
  return root;
}

const part = (root, name) => root.querySelector(`[data-part="${name}"]`);

function row(list, name, key = name) {
  let found = [...list.children].find((each) => each.dataset.row === key);
  if (!found) {
    found = make("div", { "data-row": key }, make("dt", {}, name), make("dd"));
    list.append(found);
  }
  return found.lastChild;
}

function drawMemory(tier, stats) {
  const streams = stats.cached_bytes[tier];
  const names = Object.keys(streams);
  const root = card(tier, names);
  const capacity = stats.capacity_bytes[tier];
  const used = sum(streams);
  const items = stats.cached_items[tier];
  part(root, "note").textContent = tier === "device" ? "where the model runs" : "memory of the machine";
  part(root, "used").textContent = bytes(used);
  part(root, "used").dataset.value = used;
  const of = part(root, "of");
  if (!capacity) of.textContent = "turned off";
  else {
    const text = `of ${bytes(capacity)} · ${percent(used, capacity)}`;
    metric(of, `tiercel_capacity_bytes{tier="${tier}"}`, capacity, text);
  }
  part(root, "bar").setAttribute("aria-label", `${percent(used, capacity)} full`);
  for (const piece of part(root, "bar").children) {
    const share = capacity ? streams[piece.dataset.stream] / capacity : 0;
    piece.style.width = `${100 * share}%`;
    piece.title = `${piece.dataset.stream}: ${bytes(streams[piece.dataset.stream])}`;
  }
  const list = part(root, "list");
  for (const kind of ["pages", "tails"]) {
    const of_kind = names.filter((name) => stats.tail_streams.includes(name) === (kind === "tails"));
    if (!of_kind.length) continue;
    const head = row(list, capital(kind), kind);
    head.parentNode.className = "head";
    metric(head, `tiercel_cached_items{tier="${tier}",what="${kind}"}`, items[kind], short(items[kind]));
    for (const name of of_kind) {
      const full = `tiercel_cached_bytes{tier="${tier}",stream="${name}"}`;
      metric(row(list, name), full, streams[name], bytes(streams[name]));
    }
  }
  const [word, direction] = tier === "device" ? ["Loaded from the host", "loaded"] : ["Saved from the device", "saved"];
  row(list, word, "moved").textContent = bytes(sum(stats.moved_bytes[direction]));
  hits(list, tier, stats);
  if (tier === "device" && stats.sparse) sparse(list, stats.sparse);
}

// Of sparse pages, the entries that attention selects are read on the host.
function sparse(list, numbers) {
  for (const [words, name] of [["Whole pages of running texts", "pages_whole"], ["Sparse pages", "pages_sparse"]]) {
    metric(row(list, words), `tiercel_running_${name}`, numbers[name], short(numbers[name]));
  }
  const { entries_hit: hit, entries_missed: missed } = numbers;
  const text = `${short(hit)} · ${percent(hit, hit + missed)}`;
  metric(row(list, "Selected entries in hot rows"), "tiercel_sparse_entries_hit_total", hit, text);
  row(list, "Read on the host").textContent = bytes(numbers.bytes_gathered + numbers.bytes_staged);
}

function hits(list, tier, stats) {
  const count = stats.hit_tokens[tier] ?? 0;
  metric(row(list, "Tokens reused", "hits"), `tiercel_hit_tokens_total{tier="${tier}"}`, count, short(count));
}

const STORE_WORDS = { working: "working", off: "failed: requests go on without it", trying: "is tried again" };

function drawStore(stats) {
  const { store } = stats;
  const root = card("store", [store.attached ? "records" : "none"]);
  const list = part(root, "list");
  part(root, "note").textContent = store.attached ? "outlives the server" : "";
  if (!store.attached) {
    part(root, "used").textContent = "none";
    part(root, "of").textContent = "add one with --store";
    list.replaceChildren();
    return hits(list, "store", stats);
  }
  const most = store.store?.bytes_most;
  if (store.bytes === undefined) part(root, "used").textContent = "size not known";
  else metric(part(root, "used"), "tiercel_store_bytes", store.bytes, bytes(store.bytes));
  part(root, "of").textContent = most ? `of ${bytes(most)} · ${percent(store.bytes, most)}` : "";
  part(root, "bar").setAttribute("aria-label", most ? `${percent(store.bytes, most)} full` : "size not known");
  part(root, "bar").firstChild.style.width = most ? `${(100 * store.bytes) / most}%` : "0";
  const condition = row(list, "State", "state");
  condition.textContent = STORE_WORDS[store.state] ?? store.state;
  condition.className = store.state;
  row(list, "Where", "url").textContent = state.server.store_url;
  if (store.records !== undefined) {
    metric(row(list, "Records"), "tiercel_store_records", store.records, short(store.records));
  }
  for (const [words, field, name] of [
    ["Written", "saved_bytes", "saved_bytes_total"],
    ["Read", "read_bytes", "read_bytes_total"],
    ["Waiting to be written", "queued_bytes", "queued_bytes"],
  ]) metric(row(list, words), `tiercel_store_${name}`, store[field], bytes(store[field]));
  hits(list, "store", stats);
}

// Charts: x is time, the newest interval is on the right

const HEIGHT = 150;
const LEFT = 54;
const TOP = 8;
const BOTTOM = 20;
const TALL = HEIGHT - BOTTOM - TOP;

const intervals = () => Object.entries(state.recent.intervals).map(([at, each]) => [Number(at), each]);

function drawCharts() {
  const { interval_s: step, intervals: count } = state.server;
  const newest = Math.floor((Date.now() - skewMs) / 1000 / step) * step;
  const width = $("share-chart").clientWidth || 560; // both charts are equally wide
  const wide = (width - LEFT) / count;
  const x = (at) => width - wide * ((newest - at) / step + 1);
  const here = intervals().filter(([at]) => x(at) >= LEFT - 1).sort(([a], [b]) => a - b);
  drawShares(here, x, wide, width);
  drawFirst(here, x, wide, width);
}

function frame(svg, width, lines) {
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const { interval_s: step, intervals: count } = state.server;
  const minutes = (step * count) / 60;
  const times = [...Array(minutes + 1).keys()].map((minute) => {
    const at = LEFT + ((width - LEFT) * minute) / minutes;
    const anchor = minute === minutes ? "end" : "middle";
    const text = minute === minutes ? "now" : `−${minutes - minute} min`;
    return make("svg:text", { x: at, y: HEIGHT - 4, "text-anchor": anchor }, text);
  });
  svg.replaceChildren(
    ...lines.map(([y, text]) => make("svg:g", {},
      make("svg:line", { x1: LEFT, x2: width, y1: y, y2: y }),
      make("svg:text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, text))),
    ...times);
}

function drawShares(here, x, wide, width) {
  const svg = $("share-chart");
  frame(svg, width, [0, 0.5, 1].map((share) => [TOP + TALL * (1 - share), `${100 * share} %`]));
  const total = Object.fromEntries(PARTS.map((part) => [part, 0]));
  for (const [at, { tokens }] of here) {
    let y = TOP + TALL;
    const all = sum(tokens);
    for (const source of PARTS) {
      total[source] += tokens[source];
      const tall = all ? (TALL * tokens[source]) / all : 0;
      y -= tall;
      if (tall) svg.append(make("svg:rect", { className: source, x: x(at) + 1, y, width: wide - 2, height: tall },
        make("svg:title", {}, `${short(tokens[source])} of ${short(all)} tokens: ${source}`)));
    }
  }
  const all = sum(total);
  $("share-note").textContent = all
    ? `Last ${(state.server.interval_s * state.server.intervals) / 60} minutes: ` +
      PARTS.map((source) => `${percent(total[source], all)} ${source}`).join(", ")
    : "No prompt in the last minutes";
  svg.setAttribute("aria-label", $("share-note").textContent);
}

function drawFirst(here, x, wide, width) {
  const svg = $("first-chart");
  const times = here.flatMap(([, each]) => Object.values(each.first_token_s));
  const low = Math.floor(Math.log10(Math.min(0.01, ...times)));
  const most = Math.max(low + 2, Math.ceil(Math.log10(Math.max(1, ...times))));
  const y = (time) => TOP + TALL * (1 - (Math.log10(time) - low) / (most - low));
  const marks = [...Array(most - low + 1).keys()].map((power) => 10 ** (low + power));
  frame(svg, width, marks.map((time) => [y(time), time < 1 ? `${Math.round(time * 1e4) / 10} ms` : `${time} s`]));
  const last = [];
  for (const source of SOURCES) {
    const points = here.filter(([, each]) => source in each.first_token_s);
    if (!points.length) continue;
    const dots = points.map(([at, { first_token_s: times }]) => [x(at) + wide / 2, y(times[source]), times[source]]);
    svg.append(make("svg:polyline", { className: source, points: dots.map(([a, b]) => `${a},${b}`).join(" ") }));
    for (const [cx, cy, time] of dots) {
      const title = make("svg:title", {}, `${source}: ${seconds(time)}`);
      svg.append(make("svg:circle", { className: source, cx, cy, r: 3.5 }, title));
    }
    last.push(`${source} ${seconds(dots.at(-1)[2])}`);
  }
  $("first-note").textContent = last.length ? `Median, newest: ${last.join(", ")}` : "No answer in the last minutes";
  svg.setAttribute("aria-label", `Time to first token. ${$("first-note").textContent}`);
}

// A bar of prompt tokens by source

function bar(tokens) {
  const all = sum(tokens) || 1;
  const words = PARTS.filter((source) => tokens[source]).map((source) => `${short(tokens[source])} ${source}`);
  const node = make("span", { className: "bar", role: "img", "aria-label": words.join(", "), title: words.join(", ") });
  for (const source of PARTS) {
    if (!tokens[source]) continue;
    const piece = make("i", { className: source });
    piece.style.width = `${(100 * tokens[source]) / all}%`;
    node.append(piece);
  }
  return node;
}

function drawRequests() {
  const known = state.recent.requests;
  const list = $("requests");
  for (const each of [...list.children]) if (!(each.dataset.number in known)) each.remove();
  const newest = Number(list.firstChild?.dataset.number ?? 0);
  const fresh = Object.keys(known).map(Number).filter((number) => number > newest).sort((a, b) => a - b);
  for (const number of fresh) list.prepend(request(number, known[number]));
  const empty = !list.firstChild;
  $("requests-note").textContent = empty ? "No request yet." : "Select a request to see why it did not reuse more.";
}

function request(number, told) {
  const failed = told.status >= 400;
  const clock = new Date(1000 * told.at_s).toLocaleTimeString("en-GB");
  return make("details", { "data-number": number, className: failed ? "failed" : null },
    make("summary", {},
      make("time", {}, clock),
      make("span", { className: "tokens" }, failed ? `failed: ${told.status}` : plural(sum(told.tokens), "token")),
      bar(told.tokens),
      make("b", {}, seconds(told.first_token_s))),
    make("p", {}, `${capital(told.why)}.`),
    make("p", { className: "quiet" },
      `${told.call}, ${plural(told.answer_tokens, "token")} of answer in ${seconds(told.seconds)}, id ${told.id}`));
}

// Chat

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

const redraw = () => state.recent && drawCharts();
setInterval(redraw, 5000); // time passes, also when nothing changes
addEventListener("resize", redraw);
run();
