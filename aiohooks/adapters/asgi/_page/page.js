"use strict";
// Everything that comes from the service is put into text nodes, never into markup.

const MOODS = { running: "good", finished: "good", starting: "busy", recovering: "busy", stopping: "busy", failed: "bad" };
const MOST_CHARTS = 12;
const RETRY_MS = 3000;
const token = decodeURIComponent(location.hash.slice(1));
const byId = (id) => document.getElementById(id);

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...children);
  return made;
}

function quiet(name, ...children) {
  const made = element(name, null, ...children);
  made.className = "quiet";
  return made;
}

function drawn(name, attributes) {
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

// A measured value: a step or a count is shown with all its digits, this is not.
function measured(value) {
  return value !== null && Math.abs(value) >= 1e6 ? value.toExponential(3) : number(value);
}

function seconds(value) {
  if (value === null) return "–";
  return value >= 1 ? `${number(value)} s` : value >= 1e-3 ? `${number(value * 1e3, 3)} ms` : `${number(value * 1e6, 3)} µs`;
}

function pairs(id, rows, grouped) {
  byId(id).replaceChildren(...rows.flatMap(([name, value]) => {
    const both = [element("dt", name), element("dd", value)];
    return grouped ? [element("div", null, ...both)] : both;
  }));
}

function chart(tag, series) {
  const points = series.steps.map((step, index) => [step, series.values[index]]);
  const known = points.filter(([, value]) => value !== null);
  const last = known.length ? known[known.length - 1][1] : null;
  const figure = element("figure", null, element("figcaption", null, element("span", tag), element("b", measured(last))));
  if (!known.length) {
    figure.append(quiet("p", element("span", "no number so far")));
    return figure;
  }
  const low = Math.min(...known.map(([, value]) => value)), high = Math.max(...known.map(([, value]) => value));
  const first = points[0][0], end = points[points.length - 1][0];
  const x = (step) => (end > first ? 600 * (step - first) / (end - first) : 300);
  const y = (value) => (high > low ? 150 - 140 * (value - low) / (high - low) : 80);
  let path = "", pen = "M";
  for (const [step, value] of points) {
    if (value === null) { pen = "M"; continue; }  // a gap where there was no number
    path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  if (known.length === 1) path += "h1";
  const picture = drawn("svg", { viewBox: "0 0 600 160", preserveAspectRatio: "none", role: "img" });
  const described = drawn("title", {});
  described.textContent = `${tag} from step ${first} to ${end}: from ${measured(low)} to ${measured(high)}`;
  picture.append(described);
  for (const height of [10, 80, 150]) picture.append(drawn("line", { x1: 0, x2: 600, y1: height, y2: height }));
  picture.append(drawn("path", { d: path }));
  const values = high > low ? `${measured(low)} … ${measured(high)}` : measured(low);
  const range = quiet("div", ...[`step ${number(first)}`, values, `step ${number(end)}`].map((text) => element("span", text)));
  range.classList.add("range");
  figure.append(picture, range);
  return figure;
}

function show(told) {
  document.title = `${told.state}: ${told.title}`;
  document.documentElement.dataset.mood = MOODS[told.state] ?? "";
  document.documentElement.dataset.state = told.state;
  byId("title").textContent = told.title;
  byId("state").textContent = told.state;
  const reason = [told.failure, told.stop_reason && `stop: ${told.stop_reason}`].filter(Boolean).join("; ");
  byId("notice").textContent = reason;
  byId("notice").hidden = !reason;
  pairs("figures", [
    ["global step", number(told.step)],
    ["steps per second", number(told.steps_per_sec, 3)],
    ["runs", number(told.runs)],
    ["waiting for a step", number(told.store ? told.store.waiting : 0)],
    ["recoveries", number(told.recoveries)],
  ], true);
  byId("charts").replaceChildren(...Object.entries(told.values).slice(0, MOST_CHARTS).map(([tag, one]) => chart(tag, one)));
  byId("doing-part").hidden = !told.doing.length;
  byId("doing").replaceChildren(...told.doing.map((text) => element("li", text)));
  byId("store-part").hidden = !told.store;
  if (told.store) {
    const store = told.store;
    pairs("store", [
      ["run", `${store.run}, epoch ${store.epoch}`],
      ["waiters", store.waiting ? `${number(store.waiting)}, the first for step ${number(store.wanted)}` : "nobody"],
      ...(store.waiting_secs === null ? [] : [["waiting", `for ${seconds(store.waiting_secs)}`]]),
      ["published by", store.publishers.join(", ") || "nobody"],
    ], false);
  }
  byId("hooks-part").hidden = !told.hooks.length;
  byId("hooks").replaceChildren(...told.hooks.map((one) => element("tr", null,
    element("td", one.hook), element("td", one.phase), element("td", number(one.calls)),
    element("td", seconds(one.blocking_secs)), element("td", seconds(one.waiting_secs)),
    element("td", seconds(one.longest_block_secs)))));
  byId("loop").textContent = told.loop
    ? `event loop: ${seconds(told.loop.mean_lag_secs)} late on average, ${seconds(told.loop.longest_lag_secs)} at most` : "";
}

function lost(text) {
  document.documentElement.dataset.mood = "bad";
  document.documentElement.dataset.state = "lost";
  byId("state").textContent = "no connection";
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

async function follow() {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch("events", { headers, cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.json()).message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
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
      lost("the service has closed the connection");
    } catch (error) {
      lost(error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
})();
