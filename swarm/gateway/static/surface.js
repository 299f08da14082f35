/* Notices, announcements, dialogs, popovers, colours. */

const THEMES = ["system", "light", "dark"];
const COPIED_MS = 1500;

export const $ = (id) => document.getElementById(id);
export const hide = (id) => $(id).matches(":popover-open") && $(id).hidePopover();

/** Show a notice above the message, with a button if there is something to do; an empty text takes it away. */
export function tell(text, label = "", work = null) {
  const button = $("notice").querySelector("button");
  $("notice").hidden = !text;
  $("notice").querySelector("span").textContent = text;
  button.hidden = !label;
  button.textContent = label;
  button.onclick = work;
}

/** Announce a text to screen readers. */
export function say(text) {
  $("announcer").textContent = text;
}

/** Open a dialog. Returns whether it was closed with its "yes". */
export async function chosen(dialog) {
  if (dialog.open) return false;
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes";
}

export function confirmed(question) {
  $("confirm-title").textContent = question;
  return chosen($("confirm"));
}

export async function copy(button, text, source) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(source); // not a secure context: the reader's own keys copy it
    tell("The text is selected: press your keys to copy it.");
    return;
  }
  say("Copied");
  const use = button.querySelector("use");
  use.setAttribute("href", "#i-done");
  setTimeout(() => use.setAttribute("href", "#i-copy"), 1500);
}

export function drawTheme() {
  const theme = document.documentElement.dataset.theme ?? "system";
  const words = { system: "as the system", light: "light", dark: "dark" }[theme];
  $("theme").setAttribute("aria-label", `Colours: ${words}`);
  $("theme").title = `Colours: ${words}`;
}

export function nextTheme() {
  const { dataset } = document.documentElement;
  const next = THEMES[(THEMES.indexOf(dataset.theme ?? "system") + 1) % THEMES.length];
  if (next === "system") delete dataset.theme;
  else dataset.theme = next;
  try {
    localStorage.setItem("swarm-theme", next);
  } catch {
    // storage is off: until the page is closed, then
  }
  drawTheme();
}

/** Put a popover above the button that opens it, where there is room; phones have it at the bottom. */
export function place(popover, button) {
  const box = button.getBoundingClientRect();
  popover.style.setProperty("--left", `${Math.round(box.left)}px`);
  popover.style.setProperty("--bottom", `${Math.round(innerHeight - box.top + 8)}px`);
}
