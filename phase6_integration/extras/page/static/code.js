// A request as a command, and as a program.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(url, body, hasKey) {
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"' : "";
  return `curl -N ${quoted(`${url}v1/chat/completions`)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify({ ...body, stream: true }, null, 2))}`;
}

const OPENAI = new Set(["messages", "temperature", "top_p", "seed", "n", "max_tokens", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "response_format"]);

/** For OpenAI's client: fields that it does not know go into `extra_body`. */
export function python(url, model, body, hasKey) {
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name)), others = Object.entries(body).filter(([name]) => !OPENAI.has(name));
  const fields = [["model", model], ...known, ["stream", true]].map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (others.length) fields.push(`    extra_body=${literal(Object.fromEntries(others), 4)},`);
  const key = hasKey ? "" : ', api_key="none"';  // with one, the client reads OPENAI_API_KEY
  return `from openai import OpenAI

client = OpenAI(base_url="${url}v1"${key})
stream = client.chat.completions.create(
${fields.join("\n")}
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function literal(value, indent) {
  const pad = " ".repeat(indent + 4), end = `\n${" ".repeat(indent)}`;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[${value.map((item) => `\n${pad}${literal(item, indent + 4)},`).join("")}${end}]` : "[]";
  if (typeof value === "object") return `{${Object.entries(value).map(([name, item]) => `\n${pad}${JSON.stringify(name)}: ${literal(item, indent + 4)},`).join("")}${end}}`;
  return JSON.stringify(value);
}
