"use strict";
// All data of the service goes into text nodes, never into markup.

const LEVELS = { running: "good", finished: "good", starting: "busy", recovering: "busy", paused: "busy", draining: "busy", stopping: "busy", failed: "bad" };
const RETRY_MS = 3000;
const token = decodeURIComponent(location.hash.slice(1));
const headers = token ? { Authorization: `Bearer ${token}` } : {};
const byId = (id) => document.getElementById(id);

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function muted(name, ...children) {
  const made = element(name, null, ...children);
  made.className = "muted";
  return made;
}

function svgElement(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
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
  const names = [...byId(id).closest("table").querySelectorAll("th")].map((one) => one.textContent);
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

// The wait-for graph: a box for each node, what it waits for to the right of it. A click follows the waits from a box.
let followed = null;
function whyPicture(graph) {
  const after = new Map(graph.nodes.map((node) => [node.id, []]));
  for (const [waiter, awaited] of graph.edges) after.get(waiter)?.push(awaited);
  const awaited = new Set(graph.edges.map((edge) => edge[1]));
  const shown = graph.nodes.filter((node) => awaited.has(node.id) || after.get(node.id).length);
  const depths = new Map();
  let row = shown.filter((node) => !awaited.has(node.id)).map((node) => node.id);
  for (const left = shown.map((node) => node.id); depths.size < left.length;) {
    if (!row.length) row = [left.find((id) => !depths.has(id))];  // only a cycle leads there
    for (let depth = 0; row.length; depth++) {
      row = row.filter((id) => !depths.has(id));
      for (const id of row) depths.set(id, depth);
      row = row.flatMap((id) => after.get(id));
    }
  }
  const columns = [], places = new Map();
  for (const [id, depth] of depths) {
    columns[depth] = (columns[depth] ?? 0) + 1;
    places.set(id, [depth * 240, (columns[depth] - 1) * 54]);
  }
  const path = new Set();
  for (const ahead = depths.has(followed) ? [followed] : []; ahead.length;) {
    const id = ahead.pop();
    if (!path.has(id)) { path.add(id); ahead.push(...after.get(id)); }
  }
  const size = { width: columns.length * 240, height: Math.max(1, ...columns.map((count) => count ?? 1)) * 54 };
  const picture = svgElement("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "img" });
  for (const [one, other] of graph.edges) {
    const [x, y] = places.get(one), [toX, toY] = places.get(other);
    const bad = graph.deadlocks.some((cycle) => cycle.includes(one) && cycle.includes(other));
    const line = svgElement("path", { d: `M${x + 200} ${y + 22}C${x + 225} ${y + 22} ${toX - 25} ${toY + 22} ${toX} ${toY + 22}` });
    line.classList.toggle("failed", bad);
    line.classList.toggle("followed", path.has(one));
    picture.append(line);
  }
  for (const node of shown) {
    const [x, y] = places.get(node.id), box = svgElement("g", { tabindex: 0, role: "button" });
    const place = node.where === null ? node.detail : node.where.split("/").pop() + (node.secs === null ? "" : `, ${seconds(node.secs)}`);
    box.append(svgElement("rect", { x, y, width: 200, height: 44, rx: 6 }));
    for (const [text, down] of [[node.name, 18], [place, 36]]) {
      const label = svgElement("text", { x: x + 8, y: y + down });
      label.textContent = text.length > 30 ? `${text.slice(0, 29)}…` : text;
      box.append(label);
    }
    const title = svgElement("title", {});
    title.textContent = [node.name, node.detail, node.function, node.where].filter(Boolean).join("\n");
    box.append(title);
    box.classList.toggle("followed", path.has(node.id));
    const follow = () => {
      followed = followed === node.id ? null : node.id;
      byId("why").replaceChildren(whyPicture(graph));
    };
    box.addEventListener("click", follow);
    box.addEventListener("keydown", (event) => { if (event.key === "Enter") follow(); });
    picture.append(box);
  }
  return picture;
}

let asking = false;
async function showWhy() {
  if (asking || !byId("why-part").open) return;
  asking = true;
  try {
    const response = await fetch("why", { headers, cache: "no-store" });
    if (!response.ok) throw new Error(response.status === 404 ? "needs SessionService(controls=True)" : (await response.json()).message);
    const graph = await response.json();
    byId("why").replaceChildren(whyPicture(graph));
    byId("why-lines").replaceChildren(...graph.lines.map((line) => element("li", line)));
  } catch (error) {
    byId("why-lines").replaceChildren(element("li", error.message));
  } finally {
    asking = false;
  }
}
byId("why-part").addEventListener("toggle", showWhy);

function show(report) {
  showWhy();
  document.title = `${report.state}: ${report.title}`;
  document.documentElement.dataset.level = LEVELS[report.state] ?? "";
  document.documentElement.dataset.state = report.state;
  byId("title").textContent = report.title;
  byId("state").textContent = report.state;
  const reason = [report.failure, report.stop_reason && `stop: ${report.stop_reason}`, report.pause_reason && `paused: ${report.pause_reason}`,
    report.drain_reason && !report.stop_reason && `draining: ${report.drain_reason}`].filter(Boolean).join("; ");
  byId("notice").textContent = reason;
  byId("notice").hidden = !reason;
  const isEnding = ["stopping", "finished", "failed"].includes(report.state);
  byId("pause").textContent = report.pause_reason ? "Resume" : "Pause";
  byId("pause").disabled = isEnding;
  byId("drain").disabled = isEnding || Boolean(report.drain_reason);
  pairs("figures", [
    ["global step", number(report.step)],
    ["steps per second", number(report.steps_per_sec, 3)],
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
  byId("calls-part").hidden = !report.hook_calls.some((one) => one.failures || one.dropped || one.pending);
  table("calls", report.hook_calls, (one) => [
    one.disabled_since === null ? one.name : `${one.name} (disabled)`,
    number(one.calls), number(one.failures), number(one.dropped), number(one.pending), one.last_error ?? ""]);
  byId("hooks-part").hidden = !report.hooks.length;
  table("hooks", report.hooks, (one) => [
    one.hook, one.phase, number(one.calls), seconds(one.blocking_secs), seconds(one.waiting_secs), seconds(one.longest_block_secs)]);
  byId("loop").textContent = report.loop
    ? `event loop: ${seconds(report.loop.mean_lag_secs)} late on average, ${seconds(report.loop.longest_lag_secs)} at most` : "";
}

// The service serves these paths with controls=True only. An event follows, but only with the next step.
async function control(path) {
  try {
    const response = await fetch(path, { method: "POST", headers });
    if (!response.ok) throw new Error((await response.json()).message);
    show(await (await fetch("progress", { headers, cache: "no-store" })).json());
  } catch (error) {
    byId("notice").textContent = `${path}: ${error.message}`;
    byId("notice").hidden = false;
  }
}

byId("pause").addEventListener("click", () => control(byId("pause").textContent.toLowerCase()));
byId("drain").addEventListener("click", () => {
  if (confirm("Finish what is under way, and stop the session? It cannot be resumed.")) control("drain");
});

function showDisconnected(text) {
  document.documentElement.dataset.level = "bad";
  document.documentElement.dataset.state = "disconnected";
  for (const button of document.querySelectorAll("button")) button.disabled = true;
  byId("state").textContent = "no connection";
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

async function follow() {
  const response = await fetch("events", { headers, cache: "no-store" });
  if (!response.ok) throw new Error((await response.json()).message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data) show(JSON.parse(data.slice(6)));
      if (event.startsWith("event: end\n")) return true;
    }
  }
}

(async () => {
  for (;;) {
    try {
      if (await follow()) return;
      showDisconnected("the service has closed the connection");
    } catch (error) {
      showDisconnected(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
})();
