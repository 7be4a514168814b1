// What else happened in the chosen span: a card for each thing that applies to this server.

import { $, bytes, capital, make, metric, part, percent, rate, seconds, short, SOURCES, sum } from "./words.js";

const TENANTS_SHOWN = 50;

export function drawSections(past, state) {
  const { stats, http } = state;
  const last = `last ${past.name}`;
  section("evictions", "Evictions", last, evictions(past, stats));
  section("trouble", "Preemptions and errors", last, trouble(past, state));
  section("speculation", "Speculation", last, speculation(past, stats));
  section("peers", "Peers", last, peers(past, stats));
  section("stages", "Stages", last, stages(past, stats));
  section("memory", "Memory", "now", memory(stats, http));
  drawBar(stats.device_use);
  drawTenants(past, state);
}

// One row: a counter of /metrics, and how much it grew. `bad`: it should not grow.
function counter(past, words, name, total, path, { tell = short, bad = false } = {}) {
  const grown = past.grown(...path);
  return { words, name, value: total, text: tell(grown), className: bad && grown ? "off" : "", grown };
}

const head = (words) => ({ words, text: "", head: true });
const now = (words, name, value, text) => ({ words, name, value, text });
const derived = (words, text, title) => ({ words, text, title });

// A card is there if it has rows. They are made again only if there are others than before.
function section(name, title, note, rows) {
  const root = $(name);
  root.hidden = !rows.length;
  const made = rows.map(({ words, head: isHead }) => `${isHead ? "#" : ""}${words}`).join("\n");
  if (root.dataset.made !== made) {
    root.dataset.made = made;
    part(root, "list").replaceChildren(...rows.map(({ words, head: isHead }) =>
      make("div", { className: isHead ? "head" : null, "data-row": words }, make("dt", {}, words), make("dd"))));
  }
  part(root, "title").textContent = title;
  part(root, "note").textContent = note;
  for (const [i, each] of rows.entries()) {
    const node = part(root, "list").children[i].lastChild;
    node.className = each.className ?? "";
    if (!each.name) {
      node.textContent = each.text;
      if (each.title) node.title = each.title;
      continue;
    }
    metric(node, each.name, each.value, each.text);
    if (each.grown !== undefined) {
      node.dataset.grown = each.grown;
      node.title += ` since the start; + ${each.grown} in the ${note}`;
    }
  }
}

const WHY = { room: "others needed the place", limit: "their tenant had too much", path: "a text had too many" };

function evictions(past, { evicted }) {
  const rows = Object.entries(evicted).flatMap(([tier, kinds]) => {
    const own = Object.entries(kinds).flatMap(([kind, whys]) => Object.entries(whys)
      .filter(([, count]) => count)
      .map(([why, count]) => counter(past, `${capital(kind)}: ${WHY[why] ?? why}`,
        `tiercel_evicted_total{tier="${tier}",what="${kind}",why="${why}"}`, count,
        ["stats", "evicted", tier, kind, why])));
    return own.length ? [head(capital(tier)), ...own] : [];
  });
  return rows.length ? rows : [derived("Nothing has left a tier since the start", "")];
}

const ENGINE = [
  ["preemptions", "Preemptions: pages given up for others"],
  ["finished_error", "Answers that ended with an error"],
  ["finished_abort", "Answers that their client left"],
  ["finished_grammar", "Answers that left their grammar"],
  ["loads_failed", "Loads from the host that failed"],
  ["steps_failed", "Steps that failed"],
];
const ALWAYS = ["preemptions", "finished_error"];
const STORE = [["failures", "Calls to the store that failed"], ["timeouts", "Calls to the store that took too long"],
  ["writes_lost", "Records that could not be written"]];

function trouble(past, { stats, http }) {
  const rows = [];
  for (const [name, words] of ENGINE) {
    const count = stats.engine[name] ?? 0;
    if (!(name in stats.engine) || (!count && !ALWAYS.includes(name))) continue;
    const bad = !["preemptions", "finished_abort"].includes(name);
    rows.push(counter(past, words, `tiercel_engine_${name}_total`, count, ["stats", "engine", name], { bad }));
  }
  for (const [name, words] of STORE) {
    const count = stats.store.counters?.[name];
    if (!count) continue;
    rows.push(counter(past, words, `tiercel_store_${name}_total`, count, ["stats", "store", "counters", name], { bad: true }));
  }
  for (const [flaw, count] of Object.entries(stats.store.flaws ?? {})) {
    if (!count) continue;
    const name = `tiercel_store_flaws_total{flaw="${flaw}"}`;
    rows.push(counter(past, `Records not used: ${flaw}`, name, count, ["stats", "store", "flaws", flaw], { bad: true }));
  }
  for (const [call, statuses] of Object.entries(http.requests)) {
    for (const [status, count] of Object.entries(statuses)) {
      if (status < 400) continue;
      const name = `tiercel_http_requests_total{call="${call}",status="${status}"}`;
      rows.push(counter(past, `${status} ${call}`, name, count, ["http", "requests", call, status], { bad: status !== "499" }));
    }
  }
  return rows;
}

function speculation(past, { engine, accept_length: lengths }) {
  if (!engine.guesses) return [];
  const of = (name) => past.grown("stats", "engine", name);
  const steps = of("guessing_steps");
  const kept = of("guesses_accepted");
  return [
    derived("Tokens for each step with guesses", steps ? rate(of("guessing_tokens") / steps) : "–",
      "rate of tiercel_engine_guessing_tokens_total ÷ rate of tiercel_engine_guessing_steps_total"),
    counter(past, "Guesses made", "tiercel_engine_guesses_total", engine.guesses, ["stats", "engine", "guesses"]),
    counter(past, "Guesses kept", "tiercel_engine_guesses_accepted_total", engine.guesses_accepted,
      ["stats", "engine", "guesses_accepted"], { tell: () => `${short(kept)} · ${percent(kept, of("guesses"))}` }),
    ...(Object.keys(lengths).length ? [head("First 8 tokens, since the start")] : []),
    ...SOURCES.filter((source) => source in lengths).map((source) => [source, lengths[source]]).map(([source, length]) =>
      now(`After ${source}`, `tiercel_accept_length{source="${source}"}`, length, `${length.toFixed(2)} per step`)),
  ];
}

const PEER = [["reads", "Reads"], ["bytes_read", "Read", bytes], ["failures", "Calls that failed", short, true],
  ["other_form", "Answers in another form", short, true], ["connections", "Connections opened"], ["restarts", "Restarts"]];
const SHARED = [["records_sent", "Records sent"], ["bytes_sent", "Sent", bytes], ["leases_timed_out", "Leases that timed out", short, true],
  ["keys_refused", "Wrong keys", short, true], ["readers_refused", "Too many readers", short, true], ["errors", "Connections with an error", short, true]];

function peers(past, { store, shared, engine }) {
  const rows = [];
  for (const [number, told] of Object.entries(store.store?.peers ?? {})) {
    rows.push(head(`Peer ${number}, by ${told.transport}`));
    for (const [name, words, tell = short, bad = false] of PEER) {
      const path = ["stats", "store", "store", "peers", number, name];
      rows.push(counter(past, words, `tiercel_store_peer_${name}_total{peer="${number}"}`, told[name], path, { tell, bad }));
    }
  }
  if (shared) {
    rows.push(head("Our host pages, read by others"), now("Readers now", "tiercel_shared_readers", shared.readers, short(shared.readers)));
    for (const [name, words, tell = short, bad = false] of SHARED) {
      if (bad && !shared[name]) continue;
      rows.push(counter(past, words, `tiercel_shared_${name}_total`, shared[name], ["stats", "shared", name], { tell, bad }));
    }
  }
  if (engine.prompts_elsewhere) {
    rows.push(head("Prompts that others computed"));
    for (const [name, words] of [["prompts_elsewhere", "Prompts"], ["pages_elsewhere", "Pages of them"]]) {
      rows.push(counter(past, words, `tiercel_engine_${name}_total`, engine[name], ["stats", "engine", name]));
    }
  }
  return rows;
}

function stages(past, { stages: known }) {
  return Object.entries(known).map(([number, { busy_s: busy }]) => counter(past, `Stage ${number} computes`,
    `tiercel_stage_busy_seconds_total{stage="${number}"}`, busy, ["stats", "stages", number, "busy_s"],
    { tell: (grown) => `${percent(Math.min(grown, past.seconds), past.seconds)} · ${seconds(grown)}` }));
}

const USES = { weights: "Weights", cache: "Cache, full or empty", other: "Other use of the device", free: "Free" };

function memory({ device_use: use }, { process_bytes: own }) {
  const rows = Object.entries(use).map(([what, size]) =>
    now(USES[what] ?? what, `tiercel_device_memory_bytes{what="${what}"}`, size, bytes(size)));
  if (own) rows.push(derived("The server's process, all of it", bytes(own), `process_resident_memory_bytes = ${own}`));
  return rows;
}

// Only where the device tells how much it has.
function drawBar(use) {
  const line = part($("memory"), "bar");
  const all = sum(use);
  line.hidden = !("free" in use);
  line.setAttribute("aria-label", `${percent(all - use.free, all)} of ${bytes(all)} used`);
  for (const piece of line.children) piece.style.width = `${(100 * use[piece.dataset.use]) / all || 0}%`;
}

const TOKENS = ["prompt", "cached", "completion"];

// Tenants with the most tokens first.
function drawTenants(past, { stats, http }) {
  const root = $("tenants");
  const names = Object.keys(http.tenants);
  root.hidden = !names.length;
  if (root.hidden) return;
  const grown = (name, ...path) => past.grown("http", "tenants", name, ...path);
  const used = (name) => grown(name, "tokens", "prompt") + grown(name, "tokens", "completion");
  const shown = names.sort((a, b) => used(b) - used(a) || (a < b ? -1 : 1)).slice(0, TENANTS_SHOWN);
  part(root, "note").textContent = `last ${past.name}` +
    (names.length > shown.length ? `, ${shown.length} of ${names.length}: those with the most tokens` : "");
  part(root, "rows").replaceChildren(...shown.map((name) => {
    const { requests, tokens, refused } = http.tenants[name];
    const held = stats.owners[name] ?? {};
    const cell = (value, text, full, className) => {
      const node = make("td", { className });
      if (full) metric(node, full, value, text);
      else node.textContent = text;
      return node;
    };
    const of = (what) => `tiercel_tenant_tokens_total{tenant="${name}",tokens="${what}"}`;
    const [prompt, cached, completion] = TOKENS.map((what) => grown(name, "tokens", what));
    const refusals = sum(grown(name, "refused"));
    return make("tr", { "data-row": name },
      make("th", { scope: "row" }, name),
      cell(requests, short(grown(name, "requests")), `tiercel_tenant_requests_total{tenant="${name}"}`),
      cell(tokens.prompt, short(prompt), of("prompt")),
      cell(tokens.cached, `${short(cached)} · ${percent(cached, prompt)}`, of("cached")),
      cell(tokens.completion, short(completion), of("completion")),
      cell(refused, short(refusals), null, refusals ? "off" : null),
      ...["device", "host"].map((tier) => cell(held[`${tier}_bytes`] ?? 0, bytes(held[`${tier}_bytes`]),
        `${tier}_bytes` in held && `tiercel_tenant_${tier}_bytes{tenant="${name}"}`)),
      cell(held.bytes_most, held.bytes_most === undefined ? "none" : bytes(held.bytes_most),
        "bytes_most" in held && `tiercel_tenant_bytes_most{tenant="${name}"}`));
  }));
}
