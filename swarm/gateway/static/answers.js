/* Answers as data: the request for one, and its measurement while it comes. */

export const SETTINGS = { temperature: null, top_p: null, max_tokens: null, seed: null, system: "" }; // null: not sent

const RATED_TOKENS = 4; // fewer say nothing about a rate

export const newId = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 10)}`;

/** A new answer, or one that is to go on, before its first part. */
export function begun(partial, model) {
  const message = partial ?? { id: newId(), role: "assistant", content: "", reasoning: "", thought_s: null, hops: [], changes: [] };
  const nothing = { failure: null, finish: null, waiting: "", elapsed_s: 0, ttft_s: null, rate: null, tokens: 0, exact: false, prompt: null, cached: 0 };
  return Object.assign(message, nothing, { state: "running", model });
}

/** The body of a request for the next message. goesOn: the answer that is to go on, with all that was said before it. */
export function requestOf({ id, model, messages, settings }, goesOn) {
  const said = [];
  for (const { role, content } of goesOn ? messages.slice(0, messages.indexOf(goesOn) + 1) : messages) {
    const last = said.at(-1);
    if (!content) continue; // an answer that ended before its first text
    if (last?.role === role) last.content += `\n\n${content}`; // templates want the roles in turn
    else said.push({ role, content });
  }
  const request = { model, stream: true, stream_options: { include_usage: true }, prompt_cache_key: id };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (settings[name] !== null) request[name] = settings[name];
  if (goesOn) request.continue_final_message = true;
  return { ...request, messages: settings.system ? [{ role: "system", content: settings.system }, ...said] : said };
}

/** Measures an answer, and collects its parts in the message. */
export class Clock {
  #began = performance.now();
  #first = null; // when the first token came, in seconds from the beginning
  #last = 0;
  #count = 0; // pieces: a token each, nearly always
  #message;

  constructor(message) {
    this.#message = message;
  }

  get #now() {
    return (performance.now() - this.#began) / 1000;
  }

  tick() {
    if (this.#message.state === "running") this.#message.elapsed_s = this.#now;
  }

  take({ text, reasoning, route, finish, usage, waiting }) {
    const message = this.#message;
    message.waiting = waiting ?? "";
    if (text || reasoning) this.#token(Boolean(text));
    if (text) message.content += text;
    if (reasoning) message.reasoning += reasoning;
    if (finish) [message.finish, this.#last] = [finish, this.#now];
    if (route) this.#route(route);
    if (usage) {
      Object.assign(message, { tokens: usage.completion_tokens, exact: true, prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0 });
    }
    const span = this.#last - (this.#first ?? 0);
    message.rate = message.tokens > RATED_TOKENS && span > 0 ? (message.tokens - 1) / span : null;
  }

  #token(isText) {
    const message = this.#message;
    this.#last = this.#now;
    if (this.#first === null) this.#first = message.ttft_s = this.#last;
    if (isText && message.reasoning && message.thought_s === null) message.thought_s = this.#last - this.#first;
    message.tokens = ++this.#count;
  }

  #route({ left, hops, took_s }) {
    const before = new Set(this.#message.hops.map((hop) => hop.peer));
    this.#message.hops = hops.map((hop) => {
      const [peer, blocks = ""] = hop.split(" ");
      return { peer, blocks };
    });
    const came = before.size ? this.#message.hops.map((hop) => hop.peer).filter((peer) => !before.has(peer)) : [];
    if (left.length || took_s > 0) this.#message.changes.push({ at_s: this.#now, left, came, took_s });
  }
}
