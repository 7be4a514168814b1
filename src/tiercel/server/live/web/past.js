// The past: how much counters grew in the chosen span, step by step and together.

import { nowS } from "./feed.js";
import { $, make } from "./words.js";

const at = (tree, path) => path.reduce((node, name) => node?.[name], tree);

function total(first, second) {
  if (Array.isArray(first)) return first.map((count, i) => count + second[i]);
  if (typeof first !== "object") return first + second;
  const added = { ...first };
  for (const [name, value] of Object.entries(second)) {
    added[name] = name in first ? total(first[name], value) : value;
  }
  return added;
}

// The steps of a span: when each began, how long it lasted so far, and what grew in it.
class Past {
  constructor(name, { step_s: step, steps: count }, steps, startedS) {
    this.name = name;
    this.step = step;
    this.count = count;
    const now = nowS();
    this.newest = Math.floor(now / step) * step;
    this.oldest = this.newest - (count - 1) * step;
    const lasted = (begin) => Math.max(1, Math.min(now, begin + step) - Math.max(begin, startedS));
    this.seconds = Math.max(1, now - Math.max(this.oldest, startedS));
    this.steps = Object.entries(steps)
      .map(([begin, grown]) => ({ begin: Number(begin), grown, seconds: lasted(Number(begin)) }))
      .filter(({ begin }) => begin >= this.oldest && begin <= this.newest)
      .sort((a, b) => a.begin - b.begin);
    this.all = this.steps.reduce((sum, { grown }) => total(sum, grown), {});
  }

  // How much the counter at a path of the state grew.
  grown(...path) {
    return at(this.all, path) ?? 0;
  }
}

// As Prometheus computes it: values lie evenly within a bucket. Above all bounds: the last bound.
export function quantile(share, bounds, counts) {
  let left = share * counts.reduce((sum, count) => sum + count, 0);
  if (!left) return null;
  const found = counts.findIndex((count) => (left -= count) <= 0);
  if (found < 0 || found >= bounds.length) return bounds.at(-1);
  const low = found ? bounds[found - 1] : 0;
  return low + (bounds[found] - low) * (1 + left / counts[found]);
}

// The counts of several histograms together.
export const together = (histograms) => histograms.filter(Boolean).map(({ counts }) => counts)
  .reduce((sum, counts) => (sum.length ? total(sum, counts) : counts), []);

let chosen = null;

export function look(state) {
  const name = chosen ?? Object.keys(state.server.spans)[0];
  return new Past(name, state.server.spans[name], state.history[name], state.server.started_s);
}

export function offerSpans(spans, changed) {
  const names = Object.keys(spans);
  if ($("spans").dataset.names === names.join()) return;
  $("spans").dataset.names = names.join();
  chosen = names[0];
  $("spans").replaceChildren(make("legend", { className: "hidden" }, "Show the last"), ...names.map((name) => {
    const radio = make("input", { type: "radio", name: "span", value: name, checked: name === chosen && "" });
    radio.addEventListener("change", () => {
      chosen = name;
      changed();
    });
    return make("label", {}, radio, make("span", {}, name));
  }));
}
