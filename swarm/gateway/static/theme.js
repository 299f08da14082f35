/* Runs before the first paint: a reader with a choice of light or dark never sees the other one. */
"use strict";
try {
  const theme = localStorage.getItem("swarm-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // storage is off: the system's theme it is
}
