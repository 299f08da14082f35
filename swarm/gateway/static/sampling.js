/* The drawer with the settings of a chat. A setting that is left alone is not sent: the model's default holds. */

import { SETTINGS } from "./answers.js";
import { apiKey } from "./client.js";
import { $ } from "./surface.js";

export function drawSettings(settings) {
  for (const field of $("settings").elements) {
    if (!(field.name in SETTINGS)) continue;
    const value = settings[field.name];
    const output = $(`${field.name}-now`);
    if (output) output.textContent = value ?? "model’s default";
    if (field !== document.activeElement || field.type === "range") field.value = value ?? (field.type === "range" ? 1 : "");
  }
  $("tune").classList.toggle("used", Object.keys(SETTINGS).some((name) => settings[name] !== SETTINGS[name]));
  $("change-key").hidden = !apiKey();
}

/** Put a field's value into the settings. Returns whether it can be sent. */
export function takeSetting(field, settings) {
  if (!(field.name in SETTINGS) || !field.checkValidity()) return false;
  settings[field.name] = field.name === "system" ? field.value : field.value === "" ? null : Number(field.value);
  return true;
}
