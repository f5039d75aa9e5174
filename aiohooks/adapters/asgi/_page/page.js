"use strict";
// All data of the service goes into text nodes, never into markup.

const LEVELS = { running: "good", finished: "good", starting: "busy", recovering: "busy", paused: "busy", draining: "busy", stopping: "busy", failed: "bad" };
const REFRESH_MS = 1000;
const RETRY_MS = 3000;
const RATE_WINDOW_MS = 10000;
const byId = (id) => document.getElementById(id);

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(digits - 1) : Number(value.toPrecision(digits)).toString();
}

function seconds(value) {
  if (value === null) return "–";
  return value >= 1 ? `${number(value)} s` : value >= 1e-3 ? `${number(value * 1e3, 3)} ms` : `${number(value * 1e6, 3)} µs`;
}

// Each cell has the name of its column, which a narrow screen shows in place of the head.
function table(id, rows, cells) {
  const names = [...byId(id).closest("table").querySelectorAll("th")].map((head) => head.textContent);
  byId(id).replaceChildren(...rows.map((row) => element("tr", null, ...cells(row).map((text, number) => {
    const cell = element("td", text);
    if (number) cell.dataset.name = names[number];
    return cell;
  }))));
}

function pairs(id, rows, grouped) {
  byId(id).replaceChildren(...rows.flatMap(([name, value]) => {
    const both = [element("dt", name), element("dd", value)];
    return grouped ? [element("div", null, ...both)] : both;
  }));
}

// The reports of the last ten seconds. Steps before and after a reset have no difference.
const seen = [];

function stepsPerSecond(report) {
  if (!report.store) return null;
  if (seen.length && seen.at(-1).epoch !== report.store.epoch) seen.length = 0;
  const last = { time: performance.now(), step: report.step, epoch: report.store.epoch };
  seen.push(last);
  while (seen.length > 2 && last.time - seen[1].time >= RATE_WINDOW_MS) seen.shift();
  const [first] = seen;
  return last.time > first.time ? (last.step - first.step) / (last.time - first.time) * 1000 : null;
}

function show(report) {
  document.title = `${report.state}: ${report.name}`;
  document.documentElement.dataset.level = LEVELS[report.state] ?? "";
  document.documentElement.dataset.state = report.state;
  byId("title").textContent = report.name;
  byId("state").textContent = report.state;
  const reason = [report.failure, report.stop_reason && `stop: ${report.stop_reason}`, report.pause_reason && `paused: ${report.pause_reason}`,
    report.drain_reason && !report.stop_reason && `draining: ${report.drain_reason}`].filter(Boolean).join("; ");
  byId("notice").textContent = reason;
  byId("notice").hidden = !reason;
  const isEnding = ["stopping", "finished", "failed"].includes(report.state);
  byId("stop").disabled = isEnding;
  byId("drain").disabled = isEnding || Boolean(report.drain_reason);
  pairs("figures", [
    ["global step", number(report.step)],
    ["steps per second", number(stepsPerSecond(report), 3)],
    ["runs", number(report.runs)],
    ["waiting for a step", number(report.store ? report.store.waiting : 0)],
    ["recoveries", number(report.recoveries)],
  ], true);
  byId("doing-part").hidden = !report.doing.length;
  byId("doing").replaceChildren(...report.doing.map((text) => element("li", text)));
  byId("store-part").hidden = !report.store;
  if (report.store) {
    const store = report.store;
    pairs("store", [
      ["run", `${store.run}, epoch ${store.epoch}`],
      ["waiters", store.waiting ? `${number(store.waiting)}, the first for step ${number(store.wanted)}` : "none"],
      ...(store.waiting_secs === null ? [] : [["waiting", `for ${seconds(store.waiting_secs)}`]]),
      ["published by", store.publishers.join(", ") || "none"],
    ], false);
  }
  byId("hooks-part").hidden = !report.hooks.length;
  table("hooks", report.hooks, (hook) => [
    hook.disabled_since === null ? hook.name : `${hook.name} (disabled)`,
    number(hook.failures), number(hook.dropped), number(hook.pending), hook.last_error ?? ""]);
}

async function ask(path, method = "GET") {
  const response = await fetch(path, { method, cache: "no-store" });
  const reply = await response.json();
  if (!response.ok) throw new Error(reply.message);
  return reply;
}

// The service serves these paths with controls=True only.
async function control(path) {
  try {
    await ask(path, "POST");
    show(await ask("progress"));
  } catch (error) {
    byId("notice").textContent = `${path}: ${error.message}`;
    byId("notice").hidden = false;
  }
}

for (const path of ["drain", "stop"]) {
  byId(path).addEventListener("click", () => {
    if (confirm(`${path[0].toUpperCase()}${path.slice(1)} the session? It cannot be resumed.`)) control(path);
  });
}

function showDisconnected(text) {
  document.documentElement.dataset.level = "bad";
  document.documentElement.dataset.state = "disconnected";
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  byId("state").textContent = "no connection";
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

(async () => {
  for (;;) {
    let pause = REFRESH_MS;
    try {
      const report = await ask("progress");
      show(report);
      if (["finished", "failed"].includes(report.state)) return;
    } catch (error) {
      showDisconnected(error.message);
      pause = RETRY_MS;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
})();
