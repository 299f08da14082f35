/* The gateway's API: its models, and an answer's parts as they come. A Failure has advice in words. */

const API = new URL("v1/", document.baseURI);
const KEY = "swarm-key";

/** Why there is no answer, or no more of it. title: the event; advice: the reader's next step; detail: the gateway's words. */
export class Failure extends Error {
  constructor([title, advice], { status = 0, detail = "", retryAfter = null } = {}) {
    super(title);
    this.status = status;
    this.advice = retryAfter ? `${advice} It is worth trying again in ${retryAfter} s.` : advice;
    this.detail = detail;
  }
}

const UNREACHABLE = ["The gateway does not answer.", "Check that swarm-gateway is running, then retry."];
const BROKEN = ["The connection broke.", "Continue from here, or retry."];
const WORDS = {
  context_length_exceeded: ["This chat is longer than the model can read.", "Start a new chat, or edit an earlier message to be shorter."],
  model_not_found: ["This gateway does not have the model any more.", "Choose another one below the message."],
  no_route: ["Some blocks of the model have no server now.", "Retry when a server is back, or choose another model."],
  origin_not_allowed: ["The gateway does not take this page's address.", "Its owner has to allow it: --allow-origin, or the proxy's Host header."],
  timeout: ["The servers took too long.", "Go on or retry: the gateway then chooses a new route."],
  swarm_unreachable: ["The gateway cannot reach the swarm.", "Check the gateway's network, then retry."],
  401: ["The gateway asks for an API key.", "Enter the key that its owner gave you."],
  403: ["This key may not use the model.", "Choose another model, or ask the gateway's owner."],
  404: ["The gateway does not know this address.", "Reload the page: the gateway may have been updated."],
  413: ["The chat is too long for the gateway.", "Start a new chat, or edit an earlier message to be shorter."],
  429: ["Too many requests at the moment.", "Wait a little, then retry."],
  503: ["The swarm has no room at the moment.", "Retry in a moment, or choose another model."],
  504: ["The servers took too long.", "Retry: the gateway then chooses a new route."],
};

function failureOf(status, error, retryAfter) {
  const other = status >= 400 && status < 500 ? ["The gateway refuses this request.", "Its message below names the reason."] : ["The answer failed.", "Retry."];
  return new Failure(WORDS[error?.code] ?? WORDS[status] ?? other, { status, detail: error?.message ?? "", retryAfter });
}

async function ask(path, options = {}) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(new URL(path, API), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(UNREACHABLE, { detail: API.origin });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw failureOf(response.status, body?.error, response.headers.get("Retry-After"));
}

/** The models: [{ id, status: "healthy" | "degraded" | "broken" | "unknown", note }]. */
export async function models() {
  const response = await ask("models", { signal: AbortSignal.timeout(15000) });
  return (await response.json()).data.map(({ id, swarm }) => {
    const status = ["healthy", "degraded", "broken"].includes(swarm?.status) ? swarm.status : "unknown";
    const servers = Number.isInteger(swarm?.servers) ? `${swarm.servers} ${swarm.servers === 1 ? "server" : "servers"}` : null;
    const context = Number.isInteger(swarm?.context) ? `${swarm.context.toLocaleString("en")} tokens` : null;
    return { id, status, note: [status === "unknown" ? null : status, servers, context].filter(Boolean).join(" · ") };
  });
}

/** Yields { text }, { reasoning }, { route }, { finish }, { usage } and { waiting }. A clean end is one that the gateway has told. */
export async function* answer(request, signal) {
  const headers = { "Content-Type": "application/json", "X-Swarm-Route": "show" };
  const response = await ask("chat/completions", { method: "POST", headers, signal, body: JSON.stringify(request) });
  for await (const block of blocks(response.body)) {
    if (block.startsWith(":")) yield { waiting: block.slice(1).trim() };
    const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
    if (data === "[DONE]") return;
    if (data) yield* parts(JSON.parse(data));
  }
  throw new Failure(BROKEN);
}

function* parts(chunk) {
  if (chunk.error) throw failureOf(0, chunk.error);
  if (chunk.swarm_route) yield { route: chunk.swarm_route };
  const [choice] = chunk.choices ?? [];
  if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
  if (choice?.delta?.content) yield { text: choice.delta.content };
  if (choice?.finish_reason) yield { finish: choice.finish_reason };
  if (chunk.usage) yield { usage: chunk.usage };
}

/** Splits server-sent events. */
async function* blocks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const found = (rest + value).split(/\r?\n\r?\n/);
      rest = found.pop();
      yield* found;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Failure) throw error;
    throw new Failure(BROKEN);
  } finally {
    reader.cancel().catch(() => {}); // the gateway sees that the reader has gone, and frees the servers
  }
}

let held = null; // the key, where storage is off

/** The API key, or null. It stays in this tab unless it is to be remembered. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? held;
  } catch {
    return held;
  }
}

export function keepKey(key, remember) {
  held = key;
  try {
    for (const storage of [sessionStorage, localStorage]) storage.removeItem(KEY);
    if (key) (remember ? localStorage : sessionStorage).setItem(KEY, key);
  } catch {
    // storage is off: until the page is closed, then
  }
}
