// What was saved since the start, and what each tier holds.

import { $, bytes, capital, make, metric, part, percent, row, seconds, short, sum } from "./words.js";

export function drawSaved({ hit_tokens: hits, counters, compute_saved_s: spared, compute_tokens_s: rate, queue }) {
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

export function drawTiers(state) {
  for (const tier of ["device", "host"]) drawMemory(tier, state.stats);
  drawStore(state.stats, state.server.store_url);
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

function drawStore(stats, url) {
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
  const full = store.state === "working" && store.refused;
  const words = full ? "full: keeps nothing new" : STORE_WORDS[store.state] ?? store.state;
  metric(condition, "tiercel_store_refused", Number(store.refused), words);
  condition.className = full ? "off" : store.state;
  row(list, "Where", "url").textContent = url;
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
