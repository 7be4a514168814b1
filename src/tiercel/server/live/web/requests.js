// The last requests: bars of their prompt tokens by source.

import { $, capital, make, PARTS, plural, seconds, short, sum } from "./words.js";

// A bar of prompt tokens by source

export function bar(tokens) {
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

export function drawRequests(known) {
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
