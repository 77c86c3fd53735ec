// /docs: every path of /openapi.json with the fields that it takes, from this package alone.

const make = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};

const told = await (await fetch("/openapi.json")).json();
const schemas = told.components?.schemas ?? {};
const resolve = (schema) => (schema?.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema) ?? {};

// A type in words: integer from 1, list of text, ChatCompletions, ...
function words(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.filter((one) => one.type !== "null").map(words).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${words(schema.items ?? {})}`;
  const least = schema.minimum ?? schema.exclusiveMinimum, most = schema.maximum ?? schema.exclusiveMaximum;
  const bounds = [least === undefined ? "" : ` ${schema.minimum === undefined ? "over" : "from"} ${least}`,
    most === undefined ? "" : ` ${schema.maximum === undefined ? "below" : "to"} ${most}`].join("");
  return (schema.type ?? "anything") + bounds;
}

function fields(schema, shown = new Set()) {
  const { properties = {}, required = [] } = resolve(schema);
  const rows = Object.entries(properties).map(([name, field]) => make("tr", {},
    make("td", {}, make("code", { className: required.includes(name) ? "needed" : "", textContent: name })),
    make("td", { textContent: words(field) }),
    make("td", { textContent: field.default === undefined || field.default === null ? "" : JSON.stringify(field.default) })));
  const inner = new Set(JSON.stringify(properties).match(/#\/components\/schemas\/\w+/g) ?? []);
  const parts = [...inner].filter((ref) => !shown.has(ref)).flatMap((ref) => {
    shown.add(ref);
    const of = resolve({ $ref: ref });
    return of.properties ? [make("h3", { textContent: ref.split("/").at(-1) }), make("p", { className: "hint", textContent: of.description ?? "" }), ...fields({ $ref: ref }, shown)] : [];
  });
  const head = make("tr", {}, ...["field", "type", "default"].map((text) => make("th", { textContent: text })));
  return [make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)), ...parts];
}

document.getElementById("paths").replaceChildren(...Object.entries(told.paths).flatMap(([path, operations]) =>
  Object.entries(operations).map(([method, operation]) => {
    const body = operation.requestBody?.content?.["application/json"]?.schema;
    const kinds = Object.keys(operation.responses["200"]?.content ?? {}).join(" or ");
    return make("details", { className: "card" },
      make("summary", {}, make("code", {}, make("span", { className: "method", textContent: method.toUpperCase() }), path),
        ` ${operation.description ?? ""}`),
      make("p", { className: "hint", textContent: `Answers with ${kinds || "nothing"}.${operation.security ? " Needs a key." : ""}` }),
      ...(body ? fields(body) : []));
  })));
