/* Keeps the page up to date. The server renders everything; here a newer rendering is fetched when the swarm changed, and
   what differs is put in place, so that focus, scrolling and selections stay. Without this script the page is complete. */
"use strict";
(() => {
  const REFRESH_MIN_MS = 3000; // a busy swarm changes all the time
  const REFUSED_MS = 30000;
  const HISTORY_MIN_MS = 120000; // the history's own step
  const PLOT_HEIGHT = 170;
  const PLOT_WIDTH_MIN = 160;
  const SERIES = { coverage: (v) => v * 100 };

  const root = document.documentElement;
  const announcer = document.getElementById("announcer");
  const live = document.getElementById("live");
  root.classList.add("js");

  // --- the newest rendering ---------------------------------------------------------------------------------------

  function morph(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
      old.replaceWith(fresh);
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) {
      old.data = fresh.data;
      return;
    }
    if (old.hasAttribute("data-keep")) return;
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) {
      if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const before = [...old.childNodes];
    const after = [...fresh.childNodes];
    before.forEach((node, i) => (i < after.length ? morph(node, after[i]) : node.remove()));
    old.append(...after.slice(before.length));
  }

  let wanted = 0; // revision that the server has
  let last = performance.now();
  let timer = null;

  function refreshSoon() {
    if (timer !== null || document.hidden || String(wanted) === document.body.dataset.revision) return;
    timer = setTimeout(refresh, Math.max(0, last + REFRESH_MIN_MS - performance.now()));
  }

  async function refresh() {
    last = performance.now();
    try {
      const answer = await fetch(location.href, { cache: "no-cache", signal: AbortSignal.timeout(15000) });
      if (!answer.ok && answer.status !== 404) throw new Error(answer.status);
      show(new DOMParser().parseFromString(await answer.text(), "text/html"));
      if (wanted === -1) wanted = Number(document.body.dataset.revision);
    } catch {
      wanted = Number(document.body.dataset.revision); // the next event tries again
    } finally {
      timer = null;
    }
    refreshSoon();
  }

  function show(fresh) {
    const status = () => document.getElementById("status")?.dataset.status;
    const before = status();
    const source = fresh.querySelector(".charts")?.dataset.history;
    document.title = fresh.title;
    morph(document.body, fresh.body);
    if (status() !== before && status()) {
      announcer.textContent = `Now ${status()}. ${document.getElementById("status").textContent.trim()}`;
    }
    tellAges();
    watchCharts(source);
  }

  let events = null; // none while the tab is hidden: a browser has few connections for all tabs together

  function listen() {
    if (document.hidden || events !== null) return;
    const source = (events = new EventSource(document.body.dataset.events));
    const tell = (on, text) => {
      live.hidden = false;
      live.className = on ? "on" : "off";
      live.textContent = text;
    };
    source.addEventListener("open", () => tell(true, "live"));
    source.addEventListener("error", () => {
      tell(false, "reconnecting");
      if (source.readyState !== EventSource.CLOSED || source !== events) return; // the browser tries again
      events = null;
      setTimeout(listen, REFUSED_MS * (1 + Math.random())); // too many listeners: look now and then
      wanted = -1;
      refreshSoon();
    });
    source.addEventListener("state", (event) => {
      tell(true, "live");
      wanted = JSON.parse(event.data).revision;
      refreshSoon();
    });
  }

  function tellAges() {
    for (const time of document.querySelectorAll("time[data-ago]")) {
      const s = Math.max(0, Math.round((Date.now() - Date.parse(time.dateTime)) / 1000));
      const text = s < 120 ? `${s} s ago` : s < 7200 ? `${Math.floor(s / 60)} min ago` : time.title;
      if (time.textContent !== text) time.textContent = text;
    }
  }

  // --- copying ----------------------------------------------------------------------------------------------------

  async function copy(button) {
    const source = document.getElementById(button.dataset.copy);
    let done = "Copied";
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      getSelection().selectAllChildren(source); // not a secure context: the reader's own keys copy it
      done = "Selected";
    }
    button.textContent = done;
    announcer.textContent = done;
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }

  // --- charts -----------------------------------------------------------------------------------------------------

  let plots = [];
  let drawnAt = -Infinity;
  let history = null;

  async function drawHistory() {
    const box = document.querySelector(".charts");
    if (!box) return;
    drawnAt = performance.now();
    try {
      const answer = await fetch(box.dataset.history, { signal: AbortSignal.timeout(15000) });
      if (answer.ok) history = await answer.json();
    } catch {
      return; // the table has it
    }
    draw();
  }

  function draw() {
    for (const plot of plots) plot.destroy();
    plots = [];
    if (history === null) return;
    for (const figure of document.querySelectorAll(".charts figure")) plots.push(chart(figure));
  }

  function columns(key) {
    const scale = SERIES[key] ?? ((v) => v);
    const at = [];
    const values = [];
    for (const point of history.points) {
      const before = at[at.length - 1];
      if (before !== undefined && point.at - before > 1.5 * history.step_s) {
        at.push(before + history.step_s); // nobody looked: a gap, not a line
        values.push(null);
      }
      at.push(point.at);
      values.push(point[key] === null ? null : scale(point[key]));
    }
    return [at, values];
  }

  function day(at, step_s) {
    const when = new Date(at * 1000);
    if (step_s >= 86400) return when.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
    return when.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  }

  function chart(figure) {
    const { series: key, unit } = figure.dataset;
    const style = getComputedStyle(root);
    const color = (name) => style.getPropertyValue(name).trim();
    const box = figure.querySelector(".plot");
    const readout = figure.querySelector(".readout");
    const data = columns(key);
    const number = (v) => (v === null || v === undefined ? "–" : v.toLocaleString("en", { maximumSignificantDigits: 3 }));
    const tell = (plot, index) => {
      const i = index ?? data[0].length - 1;
      const when = index === null || index === undefined ? "now" : new Date(data[0][i] * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
      readout.textContent = data[0].length ? `${number(data[1][i])} ${unit}`.trim() + ` · ${when}` : "nothing recorded yet";
    };
    const axis = { size: 28, stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "13px system-ui" };
    const options = {
      width: Math.max(PLOT_WIDTH_MIN, box.clientWidth),
      height: PLOT_HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "history" } },
      scales: { x: {}, y: { range: (plot, low, high) => [0, key === "coverage" ? 100 : Math.max(1, (high ?? 0) * 1.15)] } },
      axes: [
        { ...axis, space: 64, values: (plot, ticks, index, space, step) => ticks.map((at) => day(at, step)) },
        { ...axis, size: 52, space: 36, values: (plot, ticks) => ticks.map((v) => v.toLocaleString("en", { notation: "compact" })) },
      ],
      series: [{}, { stroke: color("--plot"), width: 2, fill: `${color("--plot")}22`, points: { show: data[0].length < 3 } }],
      hooks: { setCursor: [(plot) => tell(plot, plot.cursor.idx)] },
    };
    const plot = new uPlot(options, data, box);
    tell(plot, null);
    return plot;
  }

  const resized = new ResizeObserver(() => {
    for (const plot of plots) {
      const width = Math.max(PLOT_WIDTH_MIN, plot.root.parentElement.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: PLOT_HEIGHT });
    }
  });

  function watchCharts(source) {
    const box = document.querySelector(".charts");
    if (!box) return;
    resized.observe(box);
    const another = source !== undefined && source !== box.dataset.history; // "/" may show another model by now
    if (another) box.dataset.history = source;
    if (another || !box.querySelector("canvas") || performance.now() - drawnAt > HISTORY_MIN_MS) drawHistory();
  }

  // ----------------------------------------------------------------------------------------------------------------

  document.querySelector("details.history")?.removeAttribute("open"); // the charts say it
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-copy]");
    if (button) copy(button);
  });
  tellAges();
  setInterval(tellAges, 5000);
  watchCharts();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  listen();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      events?.close();
      events = null;
    } else listen();
    refreshSoon();
  });
})();
