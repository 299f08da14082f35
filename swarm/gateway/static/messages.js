/* Views of messages. A view is made once; update() shows its message's present state. */

import { Markdown } from "./markdown.js";

const ROUTES_SHOWN = 24; // chips; a longer route is told in words

export const clone = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);
export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
export const shortModel = (id) => id.split("/").at(-1);
const seconds = (s) => `${s < 1 ? s.toFixed(2) : s < 10 ? s.toFixed(1) : Math.round(s)} s`;
const shortPeer = (peer) => (peer.length > 10 ? `…${peer.slice(-4)}` : peer);

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export class UserView {
  constructor(message) {
    this.message = message;
    this.element = clone("t-user");
    this.update();
  }

  update() {
    write(this.element.querySelector(".bubble"), this.message.content);
  }

  /** Put a field in place of the text. send: called with the new text. */
  edit(send) {
    if (this.element.querySelector(".edit")) return;
    const form = clone("t-edit");
    const field = form.querySelector("textarea");
    const close = () => {
      form.remove();
      this.element.classList.remove("editing");
      this.element.querySelector("[data-do=edit]").focus();
    };
    field.id = `edit-${this.message.id}`;
    form.querySelector("label").htmlFor = field.id;
    field.value = this.message.content;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      close();
      if (text) send(text);
    });
    form.querySelector("[data-do=cancel]").addEventListener("click", close);
    field.addEventListener("input", () => fit(field));
    field.addEventListener("keydown", (event) => {
      if (composing(event)) return;
      if (event.key === "Escape") close();
      else if (sends(event)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.element.classList.add("editing");
    this.element.append(form);
    fit(field);
    field.focus();
  }
}

export class AnswerView {
  constructor(message) {
    this.message = message;
    this.element = clone("t-answer");
    this.text = new Markdown(this.find(".text"));
    this.reasoning = new Markdown(this.find(".reasoning .md"));
    this.update();
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  update() {
    const { message, element } = this;
    const over = message.state !== "running";
    element.className = `message answer ${message.state}`;
    element.setAttribute("aria-busy", String(!over));
    write(this.find(".by"), shortModel(message.model));
    this.text.update(message.content, over);
    this.#reasoning(over);
    this.#route();
    this.#failure();
    this.find(".facts").hidden = over && !message.tokens && message.hops.length === 0;
    write(this.find(".facts summary"), factsOf(message));
    write(this.find(".about"), detailsOf(message));
    this.find(".tools").hidden = !over;
    const mayGoOn = Boolean(message.content) && (message.state === "stopped" || message.finish === "length");
    this.find(".tools [data-do=continue]").hidden = !mayGoOn;
    this.find(".failure [data-do=continue]").hidden = !message.content;
    this.find(".tools [data-do=again]").hidden = Boolean(message.failure); // its own button says it
    this.find(".tools [data-do=copy]").hidden = !message.content;
  }

  #reasoning(over) {
    const { message } = this;
    this.find(".reasoning").hidden = !message.reasoning;
    if (!message.reasoning) return;
    const thinking = !over && !message.content;
    write(this.find(".reasoning summary"), thinking ? "Thinking…" : message.thought_s ? `Thought for ${seconds(message.thought_s)}` : "Thoughts");
    this.reasoning.update(message.reasoning, !thinking);
  }

  #route() {
    const { hops, changes } = this.message;
    const route = this.find(".route");
    const fresh = new Set(changes.flatMap((change) => change.came));
    const shown = JSON.stringify([hops, [...fresh]]);
    if (route.dataset.shown === shown && this.find(".changes").childElementCount === changes.length) return;
    route.dataset.shown = shown;
    route.hidden = hops.length === 0 || hops.length > ROUTES_SHOWN;
    route.replaceChildren(...hops.map((hop) => chip(hop, fresh)));
    this.find(".changes").replaceChildren(...changes.map(changeLine));
    this.find(".hops").replaceChildren(
      ...hops.map((hop) => {
        const line = document.createElement("li");
        line.textContent = hop.blocks ? `blocks ${hop.blocks}: ${hop.peer}` : hop.peer;
        return line;
      }),
    );
  }

  #failure() {
    const { failure, content } = this.message;
    this.find(".failure").hidden = !failure;
    if (!failure) return;
    write(this.find(".failure strong"), content ? `Incomplete. ${failure.title}` : failure.title);
    write(this.find(".advice"), failure.advice);
    write(this.find(".detail"), failure.detail);
  }
}

function chip(hop, fresh) {
  const item = document.createElement("li");
  const [blocks, peer] = [document.createElement("b"), document.createElement("span")];
  blocks.textContent = hop.blocks;
  peer.textContent = shortPeer(hop.peer);
  item.title = hop.peer;
  if (fresh.has(hop.peer)) item.className = "fresh";
  const [start, stop] = hop.blocks.split(":").map(Number);
  item.style.flexGrow = String(stop > start ? stop - start : 1);
  item.append(blocks, " ", peer);
  return item;
}

function changeLine({ at_s, left, took_s }) {
  const item = document.createElement("li");
  const time = document.createElement("span");
  time.className = "at";
  time.textContent = `after ${seconds(at_s)}`;
  const those = left.length > 3 ? plural(left.length, "server") : `Server${left.length > 1 ? "s" : ""} ${left.map(shortPeer).join(", ")}`;
  const text = left.length ? `${those} left, another took over: ${seconds(took_s)}, same text` : `The route was repaired: ${seconds(took_s)}, same text`;
  item.append(time, " ", text);
  return item;
}

function factsOf({ state, waiting, hops, ttft_s, rate, tokens, exact, elapsed_s }) {
  if (state === "running" && ttft_s === null) return `${waiting || "The servers read the prompt"} · ${seconds(elapsed_s)}`;
  const facts = [];
  if (state === "stopped") facts.push("stopped");
  if (rate !== null) facts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tok/s`);
  if (ttft_s !== null) facts.push(`first token ${seconds(ttft_s)}`);
  if (state !== "running" && tokens) facts.push(`${exact ? "" : "about "}${plural(tokens, "token")}`);
  if (state !== "running" && hops.length) facts.push(plural(new Set(hops.map((hop) => hop.peer)).size, "server"));
  return facts.join(" · ") || "details";
}

function detailsOf({ prompt, cached, finish, model }) {
  const facts = [model];
  if (prompt !== null) facts.push(`prompt of ${plural(prompt, "token")}${cached ? `, ${cached.toLocaleString("en")} of them kept from before` : ""}`);
  if (finish === "length") facts.push("ended at the limit of tokens");
  return facts.join(" · ");
}

/** Make a text field as high as its text. */
export function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

/** Whether a key press belongs to an input method; Safari says so of the last one by its code alone. */
export const composing = (event) => event.isComposing || event.keyCode === 229;

/** Whether a key press means to send: Enter alone, and not on a phone, whose keyboard has no Shift+Enter. */
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !composing(event) && !matchMedia("(pointer: coarse)").matches;
}
