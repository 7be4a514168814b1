// Charts of the chosen span: x is time, the newest step is on the right.

import { quantile, together } from "./past.js";
import { $, make, PARTS, part, percent, plural, rate, seconds, short, SOURCES, sum } from "./words.js";

const HEIGHT = 150;
const LEFT = 54;
const TOP = 8;
const BOTTOM = 20;
const TALL = HEIGHT - BOTTOM - TOP;
const NARROW = 420;

export function drawCharts(past, state) {
  drawShares(past);
  drawTokens(past);
  drawAnswered(past);
  drawFirst(past, state.stats.times.first_token_s);
  drawBetween(past, state.stats.times.inter_token_s);
}

// A chart: its frame, its scale, and the numbers above it.
class Chart {
  constructor(name, past) {
    this.svg = $(`${name}-chart`);
    this.root = this.svg.parentNode;
    this.past = past;
    this.width = this.svg.clientWidth || 560;
    this.wide = (this.width - LEFT) / past.count;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
  }

  x(begin) {
    return LEFT + this.wide * ((begin - this.past.oldest) / this.past.step);
  }

  // `lines`: [y, text] of horizontal lines.
  frame(lines) {
    const minutes = (this.past.step * this.past.count) / 60;
    const [unit, length] = minutes > 60 ? ["h", minutes / 60] : ["min", minutes];
    const parts = length % 6 ? 5 : this.width < NARROW ? 3 : 6;
    const times = [...Array(parts + 1).keys()].map((i) => {
      const x = LEFT + ((this.width - LEFT) * i) / parts;
      const ago = length - (length * i) / parts;
      return make("svg:text", { x, y: HEIGHT - 4, "text-anchor": ago ? "middle" : "end" }, ago ? `−${ago} ${unit}` : "now");
    });
    this.svg.replaceChildren(
      ...lines.map(([y, text]) => make("svg:g", {},
        make("svg:line", { x1: LEFT, x2: this.width, y1: y, y2: y }),
        make("svg:text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, text))),
      ...times);
  }

  // `stacks`: for each step [class, height as a share of the chart, title], from the bottom.
  bars(stacks) {
    for (const { begin, pieces } of stacks) {
      let y = TOP + TALL;
      for (const [className, share, title] of pieces) {
        if (!share) continue;
        y -= TALL * share;
        const place = { x: this.x(begin) + this.wide * 0.06, y, width: this.wide * 0.88, height: TALL * share };
        this.svg.append(make("svg:rect", { className, ...place }, make("svg:title", {}, title)));
      }
    }
  }

  // Lines on a logarithmic scale. `series`: {name, className, points: [[begin, value]…]}.
  lines(series, { least, most, mark, tell }) {
    const values = series.flatMap(({ points }) => points.map(([, value]) => value));
    const low = Math.floor(Math.log10(Math.min(least, ...values)));
    const high = Math.max(low + 2, Math.ceil(Math.log10(Math.max(most, ...values))));
    const y = (value) => TOP + TALL * (1 - (Math.log10(value) - low) / (high - low));
    const every = high - low > 5 ? 2 : 1;
    const marks = [...Array(Math.floor((high - low) / every) + 1).keys()].map((i) => 10 ** (low + i * every));
    this.frame(marks.map((value) => [y(value), mark(value)]));
    for (const { name, className, points } of series) {
      const dots = points.map(([begin, value]) => [this.x(begin) + this.wide / 2, y(value), value]);
      this.svg.append(make("svg:polyline", { className, points: dots.map(([a, b]) => `${a},${b}`).join(" ") }));
      const r = this.wide < 9 ? 2.5 : 3.5;
      for (const [cx, cy, value] of dots) {
        const title = make("svg:title", {}, `${name}: ${tell(value)}`);
        this.svg.append(make("svg:circle", { className, cx, cy, r }, title));
      }
    }
  }

  // The numbers above: [part, value, text, words, title].
  tell(numbers, note = "") {
    const line = part(this.root, "numbers");
    line.replaceChildren(...numbers.map(([name, value, text, words, title]) =>
      make("span", { title }, make("b", { "data-part": name, "data-value": value }, text), ` ${words}`)));
    part(this.root, "note").textContent = note;
    const told = `${line.textContent.trim()}${note && `; ${note}`}`;
    this.svg.setAttribute("aria-label", `${this.root.querySelector("h2").textContent}: ${told}`);
  }
}

// Prompt tokens of a step, or of all steps, by where they came from.
function prompts({ stats = {} }) {
  const { hit_tokens: hits = {}, counters: { tokens_asked: asked = 0, tokens_replayed: replayed = 0 } = {} } = stats;
  const { device = 0, host = 0, store = 0 } = hits;
  return { device, host, store, replayed, computed: Math.max(0, asked - device - host - store - replayed) };
}

const reused = ({ device, host, store }) => device + host + store;

function drawShares(past) {
  const chart = new Chart("share", past);
  chart.frame([0, 0.5, 1].map((share) => [TOP + TALL * (1 - share), `${100 * share} %`]));
  chart.bars(past.steps.map(({ begin, grown }) => {
    const tokens = prompts(grown);
    const all = sum(tokens);
    const title = (name) => `${short(tokens[name])} of ${short(all)} tokens: ${name}`;
    return { begin, pieces: PARTS.map((name) => [name, all && tokens[name] / all, title(name)]) };
  }));
  const tokens = prompts(past.all);
  const all = sum(tokens);
  const metrics = "tiercel_hit_tokens_total and tiercel_tokens_asked_total";
  const share = all ? reused(tokens) / all : 0;
  chart.tell([["share", share, percent(reused(tokens), all), `of ${plural(all, "token")} reused`, metrics]],
    all ? PARTS.map((name) => `${percent(tokens[name], all)} ${name}`).join(", ") : "no prompt yet");
}

function drawTokens(past) {
  const chart = new Chart("tokens", past);
  const drawn = ({ stats }) => stats?.engine?.tokens_drawn ?? 0;
  const counts = [
    ["reused", "device", "of prompts reused", (grown) => reused(prompts(grown)), "tiercel_hit_tokens_total"],
    ["computed", "computed", "computed", (grown) => sum(prompts(grown)) - reused(prompts(grown)),
      "tiercel_tokens_asked_total − tiercel_hit_tokens_total"],
    ["answers", "answers", "of answers", drawn, "tiercel_engine_tokens_drawn_total"],
  ];
  const series = counts.map(([name, className, , count]) => ({
    name, className,
    points: past.steps.map(({ begin, grown, seconds: s }) => [begin, count(grown) / s]).filter(([, value]) => value),
  }));
  chart.lines(series, { least: 1, most: 100, mark: (value) => rate(value), tell: (value) => `${rate(value)} tokens/s` });
  chart.tell(counts.map(([name, , words, count, title]) => {
    const value = count(past.all) / past.seconds;
    return [name, value, rate(value), words, `rate of ${title}`];
  }));
}

// How many requests ended well, and how many did not.
function answered(requests = {}) {
  const all = Object.values(requests).flatMap((each) => Object.entries(each));
  const count = (some) => some.reduce((total, [, number]) => total + number, 0);
  return { good: count(all.filter(([status]) => status < 400)), bad: count(all.filter(([status]) => status >= 400)) };
}

function drawAnswered(past) {
  const chart = new Chart("answered", past);
  const steps = past.steps.map(({ begin, grown, seconds: s }) => {
    const { good, bad } = answered(grown.http?.requests);
    return { begin, good: good / s, bad: bad / s };
  });
  const most = niceAbove(Math.max(0.1, ...steps.map(({ good, bad }) => good + bad)));
  chart.frame([0, 0.5, 1].map((share) => [TOP + TALL * (1 - share), rate(most * share)]));
  chart.bars(steps.map(({ begin, good, bad }) => ({
    begin,
    pieces: [["answers", good / most, `${rate(good)} answered per second`], ["bad", bad / most, `${rate(bad)} failed per second`]],
  })));
  const { good, bad } = answered(past.all.http?.requests);
  const perSecond = (good + bad) / past.seconds;
  chart.tell([["answered", perSecond, rate(perSecond), "per second", "rate of tiercel_http_requests_total"]],
    `${plural(good, "request")} answered, ${short(bad)} failed`);
}

const niceAbove = (value) => [1, 2, 3, 4, 5, 6, 8, 10].map((each) => each * 10 ** Math.floor(Math.log10(value)))
  .find((each) => each >= value);

const TIME = {
  mark: (time) => (time < 1 ? `${Math.round(time * 1e4) / 10} ms` : `${time} s`),
  tell: seconds,
};

// Half of the times, and 99 of 100, are at most as long as these.
function quantiles(chart, name, bounds, counts) {
  chart.tell([[0.5, "p50"], [0.99, "p99"]].map(([share, words]) => {
    const value = quantile(share, bounds, counts);
    const text = value === bounds.at(-1) ? `> ${seconds(value)}` : seconds(value);
    return [words, value, text, words, `histogram_quantile(${share}, ${name})`];
  }), sum(counts) ? "" : "no answer yet");
}

function points(past, share, bounds, countsOf) {
  return past.steps.map(({ begin, grown }) => [begin, quantile(share, bounds, countsOf(grown.stats?.times))])
    .filter(([, value]) => value !== null);
}

function drawFirst(past, known) {
  const chart = new Chart("first", past);
  const { bounds } = known?.computed ?? { bounds: [1] };
  const all = (times) => together(Object.values(times?.first_token_s ?? {}));
  const series = SOURCES.map((source) => ({
    name: `p50, ${source}`, className: source,
    points: points(past, 0.5, bounds, (times) => times?.first_token_s?.[source]?.counts ?? []),
  }));
  series.push({ name: "p99 of all", className: "p99", points: points(past, 0.99, bounds, all) });
  chart.lines(series, { least: 0.01, most: 1, ...TIME });
  quantiles(chart, "tiercel_first_token_by_source_seconds", bounds, all(past.all.stats?.times));
}

function drawBetween(past, known) {
  const chart = new Chart("between", past);
  const { bounds } = known ?? { bounds: [1] };
  const counts = (times) => times?.inter_token_s?.counts ?? [];
  chart.lines([
    { name: "p50", className: "answers", points: points(past, 0.5, bounds, counts) },
    { name: "p99", className: "p99", points: points(past, 0.99, bounds, counts) },
  ], { least: 0.01, most: 0.1, ...TIME });
  quantiles(chart, "tiercel_inter_token_seconds", bounds, counts(past.all.stats?.times));
}
