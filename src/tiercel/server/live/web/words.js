// Numbers as words, and nodes of the page. Plain DOM, no library.

export const SOURCES = ["device", "host", "store", "computed"];
export const PARTS = ["device", "host", "store", "replayed", "computed"]; // replayed: found, and computed again
const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function make(tag, props = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name === "className" ? "class" : name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
export const short = (number) => grouped.format(number ?? 0);
export const rate = (number) => (number < 10 ? precise : grouped).format(number);

export function bytes(number) {
  if (!number) return "0 B";
  const power = Math.min(4, Math.floor(Math.log2(number) / 10));
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"][power];
  const value = number / 1024 ** power;
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

export function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 0.0995) return `${(number * 1000).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  if (number < 60) return `${number.toFixed(number < 10 ? 2 : 1)} s`;
  if (number < 3600) return `${(number / 60).toFixed(1)} min`;
  return `${(number / 3600).toFixed(1)} h`;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
export const plural = (count, word) => `${short(count)} ${word}${count === 1 ? "" : "s"}`;
export const sum = (numbers) => Object.values(numbers ?? {}).reduce((total, number) => total + number, 0);

// One number that /metrics has too. Its tooltip names the metric.
export function metric(node, name, value, text) {
  node.dataset.metric = name;
  node.dataset.value = value;
  node.title = `${name} = ${value}`;
  if (node.textContent !== text) node.textContent = text;
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

export const part = (root, name) => root.querySelector(`[data-part="${name}"]`);

// The value of a row of a list, which is made the first time.
export function row(list, name, key = name) {
  let found = [...list.children].find((each) => each.dataset.row === key);
  if (!found) {
    found = make("div", { "data-row": key }, make("dt", {}, name), make("dd"));
    list.append(found);
  }
  return found.lastChild;
}
