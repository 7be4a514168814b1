// The list of calls: openapi.json as a page.

const main = document.getElementById("calls");

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

let schemas = {};
const named = (schema) => schema?.$ref?.split("/").pop();
const resolved = (schema) => (named(schema) ? schemas[named(schema)] : (schema ?? {}));

// A type in a few words: "integer from 0 to 20", "array of Message", "true or string".
function kind(schema) {
  if (!schema) return "";
  if (named(schema)) return named(schema);
  const any = schema.anyOf ?? schema.oneOf;
  if (any) return [...new Set(any.filter((each) => each.type !== "null").map(kind))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${kind(schema.items) || "anything"}`;
  return [schema.type ?? "anything", ...limits(schema)].join(" ");
}

function limits(schema) {
  const words = { minimum: "from", exclusiveMinimum: "above", maximum: "to", exclusiveMaximum: "below" };
  return Object.entries(words).filter(([name]) => name in schema).map(([name, word]) => `${word} ${schema[name]}`);
}

// Fields of other servers that change nothing here: any value, or only these values.
const unused = (schema) => Object.keys(schema).every((name) => name === "enum");

function table(rows) {
  const head = make("tr", "", ...["Name", "Type", "About"].map((text) => make("th", "", text)));
  return make("table", "", make("thead", "", head), make("tbody", "", ...rows));
}

function field(name, schema, required) {
  const start = schema.default ?? null;
  const given = start === null ? "" : `default ${JSON.stringify(start)}`;
  const about = [required ? "needed" : "", given, schema.description].filter(Boolean).join("; ");
  const cells = [make("code", "", name), kind(schema), about];
  return make("tr", "", ...cells.map((each) => make("td", "", each)));
}

function fields(schema) {
  const { properties = {}, required = [] } = resolved(schema);
  const rows = Object.entries(properties);
  const known = rows.filter(([, each]) => unused(each)).map(([name]) => name);
  const used = rows.filter(([, each]) => !unused(each));
  used.sort(([a], [b]) => required.includes(b) - required.includes(a));
  const about = "Known from other servers, accepted where they change nothing";
  const others = known.length ? `${about}: ${known.join(", ")}` : "";
  return make("div", "", table(used.map(([name, each]) => field(name, each, required.includes(name)))),
    make("p", "quiet", others));
}

function example(method, path, operation) {
  const lines = [`curl ${location.origin}${path}`];
  if (method !== "get") lines.push(`-X ${method.toUpperCase()}`);
  if (operation.security) lines.push('-H "authorization: Bearer $KEY"');
  if (operation.requestBody) lines.push('-H "content-type: application/json"', "-d '{…}'");
  return make("pre", "", lines.join(" \\\n  "));
}

function call(path, method, operation) {
  const inside = make("div", "", make("p", "quiet", operation.description ?? ""), example(method, path, operation));
  if (operation.parameters?.length) {
    const rows = operation.parameters.map(({ name, schema, description, required }) =>
      field(name, { ...schema, description }, required));
    inside.append(make("h3", "", "Parameters"), table(rows));
  }
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) inside.append(make("h3", "", `Body: ${kind(body)}`), fields(body));
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  if (answer && resolved(answer).properties) inside.append(make("h3", "", `Answer: ${kind(answer)}`), fields(answer));
  inside.append(make("h3", "", "Status"), make("p", "quiet",
    Object.entries(operation.responses).map(([status, each]) => `${status} ${each.description}`).join(" · ")));
  const title = make("summary", "", make("span", "method", method.toUpperCase()), make("code", "", path),
    make("span", "quiet", operation.description?.split(". ")[0] ?? ""));
  return make("details", "card call", title, inside);
}

async function run() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  const schema = await response.json();
  schemas = schema.components.schemas;
  document.getElementById("version").textContent = `${schema.info.title} ${schema.info.version}`;
  const groups = new Map();
  for (const [path, operations] of Object.entries(schema.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "other";
      groups.set(tag, [...(groups.get(tag) ?? []), call(path, method, operation)]);
    }
  }
  for (const [tag, calls] of groups) main.append(make("h2", "group", tag), ...calls);
}

run().catch((error) => main.append(make("p", "card", `The list of calls can not be shown: ${error.message}`)));
