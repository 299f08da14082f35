/* The chat page: the chat that is shown, the answers under way, keys and buttons. */

import { begun, Clock, newId, requestOf, SETTINGS } from "./answers.js";
import { answer, apiKey, keepKey, models } from "./client.js";
import { History, remembered } from "./history.js";
import { AnswerView, clone, composing, fit, plural, sends, shortModel, UserView } from "./messages.js";
import { drawSettings, takeSetting } from "./sampling.js";
import { $, chosen, confirmed, copy, drawTheme, hide, nextTheme, place, say, tell } from "./surface.js";

const MODELS_EVERY_MS = 30000;
const SAVE_EVERY_MS = 2000; // while an answer grows: a closed tab loses no more
const TICK_MS = 250; // of clocks that are shown
const TITLE_MAX = 60;
const PINNED_PX = 48; // from the end; a reader further up is left there

const running = new Map(); // chat id -> AbortController
const views = new Map(); // message -> its view, of the chat that is shown
const history = await History.open();
let chats = await history.all().catch(() => []);
let chat = null; // the one that is shown; not in `chats` before its first message
let catalogue = []; // models

// --- chats --------------------------------------------------------------------------------------------------------

function newChat() {
  const model = remembered.get("model", null);
  return { id: newId(), title: "", model, settings: { ...SETTINGS, ...remembered.get("sampling", {}) }, messages: [], at: Date.now() };
}

function show(next) {
  chat = next;
  views.clear();
  $("log").replaceChildren(...chat.messages.map(viewOf));
  location.hash === `#${chat.id}` || window.history.replaceState(null, "", chats.includes(chat) ? `#${chat.id}` : location.pathname + location.search);
  drawChat();
  drawSettings(chat.settings);
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function viewOf(message) {
  const view = message.role === "user" ? new UserView(message) : new AnswerView(message);
  view.element.dataset.id = message.id;
  views.set(message, view);
  return view.element;
}

function add(message) {
  chat.messages.push(message);
  $("log").append(viewOf(message));
}

/** Forget the messages from one on. */
function cut(message) {
  const at = chat.messages.indexOf(message);
  for (const gone of at < 0 ? [] : chat.messages.splice(at)) {
    views.get(gone)?.element.remove();
    views.delete(gone);
  }
}

function drawChat() {
  const busy = running.has(chat.id);
  const title = chat.title || "New chat";
  $("title").textContent = title;
  document.title = `${title} – swarm`;
  $("greeting").hidden = chat.messages.length > 0;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  drawHistory();
  drawModel();
}

function drawHistory() {
  if ($("history").querySelector("input")) return; // a name is being written
  $("history").replaceChildren(
    ...chats.map((each) => {
      const item = clone("t-chat");
      const link = item.querySelector("a");
      link.textContent = each.title;
      link.href = `#${each.id}`;
      if (each === chat) link.setAttribute("aria-current", "page");
      item.classList.toggle("busy", running.has(each.id));
      for (const button of item.querySelectorAll("button")) {
        const what = button.dataset.do === "rename" ? "Rename" : "Delete";
        button.setAttribute("aria-label", `${what} ${each.title}`);
        button.title = what;
      }
      item.addEventListener("click", (event) => {
        const what = event.target.closest("button")?.dataset.do;
        if (what === "rename") rename(each, item);
        else if (what === "delete") forget(each);
        else if (event.target === link) hide("chats");
      });
      return item;
    }),
  );
  $("no-history").hidden = chats.length > 0;
  $("clear").hidden = chats.length === 0;
}

function rename(each, item) {
  const field = document.createElement("input");
  field.value = each.title;
  field.setAttribute("aria-label", "Name of the chat");
  let over = false;
  const done = (keep) => {
    if (over) return;
    over = true;
    const named = chats.find(({ id }) => id === each.id); // another tab may have changed it meanwhile
    if (named && keep && field.value.trim()) named.title = field.value.trim();
    field.remove();
    if (named) save(named);
    drawChat();
  };
  field.addEventListener("blur", () => done(true));
  field.addEventListener("keydown", (event) => {
    if (composing(event) || (event.key !== "Enter" && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    done(event.key === "Enter");
  });
  item.replaceChildren(field);
  field.select();
}

async function forget(each) {
  if (!(await confirmed(`Delete “${each.title}”?`))) return;
  running.get(each.id)?.abort();
  chats = chats.filter((other) => other !== each);
  await history.delete(each.id);
  if (each === chat) show(newChat());
  else drawHistory();
}

async function forgetAll() {
  if (!(await confirmed(`Delete ${plural(chats.length, "chat")}?`))) return;
  for (const controller of running.values()) controller.abort();
  chats = [];
  await history.clear();
  show(newChat());
  hide("chats");
}

async function save(each) {
  if (!chats.includes(each)) return; // deleted meanwhile
  try {
    await history.put(each);
  } catch {
    $("where").textContent = "This browser has no room for more: delete chats that you do not need.";
  }
}

/** Take what another tab has changed. Answers under way here, and a message that is being edited, stay as they are. */
async function takeOthers() {
  const known = new Set(chats.map(({ id }) => id));
  const saved = await history.all();
  const editing = $("log").querySelector(".edit") && chat;
  const kept = chats.filter((each) => running.has(each.id) || each === editing);
  const ids = new Set(kept.map(({ id }) => id));
  chats = [...kept, ...saved.filter(({ id }) => !ids.has(id))].sort((a, b) => b.at - a.at);
  const now = chats.find(({ id }) => id === chat.id);
  if (now && now !== chat) show(now);
  else if (!now && known.has(chat.id)) show(newChat());
  else drawHistory();
}

function open() {
  const found = chats.find((each) => `#${each.id}` === location.hash);
  if (found && found !== chat) show(found);
  else if (!chat) show(newChat());
}

// --- asking -------------------------------------------------------------------------------------------------------

/** Say something in the chat that is shown. Returns whether it could be said. */
function send(text) {
  if (running.has(chat.id)) return false;
  if (!chat.model) {
    look(); // its notice says why there is none
    return false;
  }
  if (!chats.includes(chat)) {
    chats.unshift(chat);
    window.history.replaceState(null, "", `#${chat.id}`);
  }
  chat.title ||= text.split("\n")[0].slice(0, TITLE_MAX);
  add({ id: newId(), role: "user", content: text });
  ask();
  return true;
}

/** Answer the last message, or go on with the answer that it is. */
function ask(partial = null) {
  const message = begun(partial, chat.model);
  if (!partial) add(message);
  run(chat, message, requestOf(chat, partial));
}

async function run(its, message, request) {
  const controller = new AbortController();
  const clock = new Clock(message);
  let frame = 0;
  let saved = performance.now();
  const draw = () => {
    frame = 0;
    clock.tick();
    const end = pinned();
    views.get(message)?.update();
    if (end) toEnd();
    if (performance.now() - saved > SAVE_EVERY_MS) {
      saved = performance.now();
      save(its);
    }
  };
  const ticking = setInterval(draw, TICK_MS);
  running.set(its.id, controller);
  its.at = Date.now();
  chats.sort((a, b) => b.at - a.at);
  save(its);
  drawChat();
  toEnd();
  tell("");
  try {
    for await (const part of answer(request, controller.signal)) {
      clock.take(part);
      if (part.route?.left.length) say("A server left. Another took over, and the text goes on.");
      frame ||= requestAnimationFrame(draw);
    }
    message.state = "done";
  } catch (error) {
    if (controller.signal.aborted) message.state = "stopped";
    else fail(message, error);
  } finally {
    clearInterval(ticking);
    cancelAnimationFrame(frame);
    running.delete(its.id);
    draw();
    save(its);
    drawChat();
    sayEnd(message);
  }
}

function fail(message, error) {
  message.state = "broken";
  message.failure = { title: error.message, advice: error.advice ?? "Retry, or reload the page.", detail: error.detail ?? "" };
  if (error.status === 401) askKey().then((given) => given && again(message));
  if (error.status === 404) look();
}

async function again(message) {
  const its = chat;
  const later = its.messages.length - 1 - its.messages.indexOf(message);
  if (!its.messages.includes(message)) return; // of a chat that is not shown any more
  if (later && !(await confirmed(`Delete the ${later === 1 ? "message" : plural(later, "message")} after this answer?`))) return;
  if (chat !== its || busy()) return;
  cut(message);
  ask();
}

// --- models and the key -------------------------------------------------------------------------------------------

async function look() {
  try {
    catalogue = await models();
    if (catalogue.length) tell("");
    else tell("There is no model to ask: the gateway has told none.", "Look again", look);
  } catch (error) {
    if (error.status === 401) tell("The gateway asks for an API key.", "Enter the key", async () => (await askKey()) && look());
    else tell(`${error.message} ${error.advice ?? ""}`, "Look again", look);
  }
  drawModel();
}

function drawModel() {
  if (!chat.model || (catalogue.length && !chats.includes(chat) && !catalogue.some(({ id }) => id === chat.model))) chat.model = catalogue[0]?.id ?? chat.model;
  const now = catalogue.find(({ id }) => id === chat.model);
  const status = now?.status ?? (catalogue.length ? "broken" : "unknown");
  $("model").querySelector(".name").textContent = chat.model ? shortModel(chat.model) : "No model yet";
  $("model").querySelector(".dot").className = `dot ${status}`;
  $("model").setAttribute("aria-label", chat.model ? `Model: ${chat.model}, ${status}` : "Model: none yet");
  if ($("models").matches(":popover-open")) return; // not under the reader's hand
  $("model-list").replaceChildren(
    ...catalogue.map(({ id, status: its, note }) => {
      const choice = clone("t-model");
      const radio = choice.querySelector("input");
      radio.value = id;
      radio.checked = id === chat.model;
      choice.querySelector(".dot").className = `dot ${its}`;
      choice.querySelector(".name").textContent = id;
      choice.querySelector(".small").textContent = note;
      return choice;
    }),
  );
}

function keepSettings() {
  remembered.set("sampling", chat.settings);
  save(chat);
  drawSettings(chat.settings);
}

function chooseModel(id) {
  chat.model = id;
  remembered.set("model", id);
  save(chat);
  drawModel();
}

async function askKey() {
  const field = $("key-value");
  $("key").querySelector("[data-do=forget]").hidden = !apiKey();
  if (!(await chosen($("key")))) return false;
  keepKey(field.value.trim(), $("key-remember").checked);
  field.value = "";
  look();
  return true;
}

// --- seen and said ------------------------------------------------------------------------------------------------

const pinned = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < PINNED_PX;

function toEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function sayEnd(message) {
  const view = views.get(message);
  if (!view) return;
  const text = view.find(".text").innerText;
  const { failure, state } = message;
  say(failure ? `Incomplete. ${failure.title} ${failure.advice}` : state === "stopped" ? `Stopped. ${text}` : `Answer finished. ${text}`);
}

// --- keys and buttons ---------------------------------------------------------------------------------------------

const busy = () => running.has(chat.id);

function edit(message) {
  views.get(message).edit((text) => {
    if (busy()) return;
    cut(message);
    send(text);
  });
}

function onMessage(event) {
  const button = event.target.closest("button[data-do]");
  const id = event.target.closest("li.message")?.dataset.id;
  const message = chat.messages.find((each) => each.id === id);
  if (!button || !message) return;
  const what = button.dataset.do;
  const source = what === "copy-code" ? button.closest(".code").querySelector("code") : views.get(message).element.querySelector(".bubble, .text");
  if (what === "copy") copy(button, message.content, source);
  else if (what === "copy-code") copy(button, source.textContent, source);
  else if (busy()) return;
  else if (what === "edit") edit(message);
  else if (what === "again") again(message);
  else if (what === "continue") ask(message);
}

function onKey(event) {
  if (composing(event) || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input, textarea");
  if (event.key === "Escape" && busy() && !document.querySelector(":popover-open")) running.get(chat.id).abort();
  else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) $("prompt").focus();
  else if (event.key === "ArrowUp" && event.target === $("prompt") && !$("prompt").value && !busy()) {
    const last = chat.messages.findLast((message) => message.role === "user");
    if (!last) return;
    edit(last);
  } else return;
  event.preventDefault();
}

function submit(event) {
  event?.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || !send(text)) return;
  $("prompt").value = "";
  fit($("prompt"));
}

function fresh() {
  hide("chats");
  show(newChat());
  $("prompt").focus();
}

for (const each of chats) for (const message of each.messages) if (message.state === "running") {
  Object.assign(message, { state: "broken", failure: { title: "The page was closed.", advice: "Continue the answer, or retry.", detail: "" } });
}
$("log").addEventListener("click", onMessage);
$("composer").addEventListener("submit", submit);
$("prompt").addEventListener("input", () => fit($("prompt")));
$("prompt").addEventListener("keydown", (event) => sends(event) && submit(event));
$("stop").addEventListener("click", () => running.get(chat.id)?.abort());
$("ideas").addEventListener("click", (event) => event.target.tagName === "BUTTON" && send(event.target.textContent));
for (const id of ["new", "new-narrow"]) $(id).addEventListener("click", fresh);
$("clear").addEventListener("click", forgetAll);
$("theme").addEventListener("click", nextTheme);
$("settings").addEventListener("input", ({ target }) => takeSetting(target, chat.settings) && keepSettings());
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("reset", (event) => {
  event.preventDefault();
  chat.settings = { ...SETTINGS };
  keepSettings();
});
$("key").querySelector("[data-do=cancel]").addEventListener("click", () => $("key").close("no"));
$("change-key").addEventListener("click", () => {
  hide("sampling");
  askKey();
});
$("key").querySelector("[data-do=forget]").addEventListener("click", () => {
  keepKey(null, false);
  $("key").close("no");
  drawSettings(chat.settings);
  look();
});
$("model-list").addEventListener("change", (event) => chooseModel(event.target.value));
$("models").addEventListener("beforetoggle", () => place($("models"), $("model")));
$("scroll").addEventListener("scroll", () => ($("down").hidden = pinned()));
$("down").addEventListener("click", toEnd);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("prompt").focus();
});
document.addEventListener("keydown", onKey);
addEventListener("hashchange", open);
history.onChange(takeOthers);
addEventListener("pagehide", () => running.has(chat.id) && save(chat));
document.addEventListener("visibilitychange", () => document.hidden || look());
setInterval(() => document.hidden || look(), MODELS_EVERY_MS);

if (!history.lasts) $("where").textContent = "This browser keeps nothing: chats end with this tab.";
drawTheme();
open();
look();
