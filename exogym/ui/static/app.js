// The page over run folders. Whatever a run says of itself becomes text (textContent), never markup.
"use strict";

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a8a8a"];
const AXES = { step: "steps", tx_bytes: "bytes sent per node", wall_s: "seconds here", time_s: "predicted seconds" };
const CHARTS = {
  loss: ["val_loss", "train_loss"], accuracy: ["val_accuracy"], "bytes sent per node": ["tx_bytes"],
  "consensus distance": ["consensus_distance"], "examples per second": ["examples_per_s"], "learning rate": ["lr"],
};
const MOST_ROWS = 300, MOST_POINTS = 2000, POLL_MS = 1000;
const chosen = new Set();
const look = { text: "", state: "", sort: "started_s", down: true, axis: "step", shown: MOST_ROWS };
let list = [];
let page = { update() {}, leave() {} };

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  for (const child of children) element.append(child instanceof Node ? child : String(child ?? ""));
  return element;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const address = (name) => name.split("/").map(encodeURIComponent).join("/");
const figure = (value, digits = 4) => (isNumber(value) ? value.toFixed(digits) : "");

function scaled(value, units, base) {
  if (!isNumber(value)) return "";
  let k = 0;
  while (Math.abs(value) >= base && k < units.length - 1) { value /= base; k += 1; }
  return `${Number(value.toPrecision(3))} ${units[k]}`;
}
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);

function seconds(value) {
  if (!isNumber(value)) return "";
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} days`;
}

async function get(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

// ---------------------------------------------------------------- runs

const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["state", "state", (run) => run.state],
  ["strategy", "strategy", (run) => run.strategy],
  ["task", "task", (run) => run.task],
  ["step", "step", (run) => (run.step === null ? "" : `${run.step}/${run.total_steps}`), true],
  ["loss", "loss", (run) => figure(run.loss), true],
  ["tx_bytes", "sent/node", (run) => bytes(run.tx_bytes), true],
  ["wall_s", "time", (run) => seconds(run.wall_s), true],
  ["started_s", "age", (run) => seconds(Math.max(0, Date.now() / 1000 - (run.heard_s ?? run.started_s ?? 0))), true],
];

function runsPage(main) {
  const body = make("tbody"), head = make("tr"), count = make("p", { class: "soft", role: "status" });
  const compare = make("button", { type: "button", id: "compare", onclick() {
    location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join("&")}`;
  } }, "Compare selected");
  const filter = make("input", { type: "search", id: "filter", placeholder: "name, strategy, task", oninput(event) {
    look.text = event.target.value; show();
  } });
  filter.value = look.text;
  const states = make("select", { onchange(event) { look.state = event.target.value; show(); } });
  for (const state of ["", "running", "done", "stopped", "failed", "lost"]) {
    states.append(make("option", { value: state }, state || "any state"));
  }
  states.value = look.state;
  const more = make("button", { type: "button", onclick() { look.shown += MOST_ROWS; show(); } }, "Show more");
  main.append(
    make("div", { class: "bar" }, make("label", {}, "Filter ", filter), make("label", {}, "State ", states), compare),
    count, make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), body)), more);

  function heads() {
    head.replaceChildren(make("th", {}, ""), ...COLUMNS.map(([key, title, , number]) => {
      const sorted = look.sort === key ? (look.down ? "descending" : "ascending") : "none";
      const button = make("button", { type: "button", onclick() {
        look.down = look.sort === key ? !look.down : true; look.sort = key; heads(); show();
      } }, title + (sorted === "none" ? "" : look.down ? " \u2193" : " \u2191"));
      return make("th", { "aria-sort": sorted, class: number ? "number" : "" }, button);
    }));
  }

  function show() {
    const words = look.text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = list.filter((run) => (!look.state || run.state === look.state)
      && words.every((word) => `${run.name} ${run.strategy} ${run.task}`.toLowerCase().includes(word)));
    const way = look.down ? -1 : 1;
    if (look.sort !== "started_s" || !look.down) {  // the list comes newest first, each parent before its runs
      found.sort((a, b) => {
        const [x, y] = [a[look.sort], b[look.sort]];
        if (x === null || y === null) return (x === null) - (y === null);
        return way * (x < y ? -1 : x > y ? 1 : 0);
      });
    }
    count.textContent = `${found.length} of ${list.length} runs, comparisons and sweeps`;
    body.replaceChildren(...found.slice(0, look.shown).map((run) => {
      const box = make("input", { type: "checkbox", "aria-label": `select ${run.name}`, onchange(event) {
        if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
        compare.disabled = !chosen.size;
      } });
      box.checked = chosen.has(run.name);
      const cells = COLUMNS.map(([key, , text, number]) => {
        if (key === "name") {
          const way = run.kind === "run" ? `#/run/${address(run.name)}` : `#/compare/${encodeURIComponent(run.name)}`;
          return make("td", {}, make("a", { href: way }, run.name));
        }
        if (key === "state") return make("td", {}, make("span", { class: `state state-${run.state}` }, run.state));
        return make("td", { class: number ? "number" : "" }, text(run));
      });
      return make("tr", {}, make("td", {}, box), ...cells);
    }));
    more.hidden = found.length <= look.shown;
    compare.disabled = !chosen.size;
  }
  heads();
  show();
  return { update() { if (!body.contains(document.activeElement)) show(); }, leave() {} };
}

// ---------------------------------------------------------------- curves

function axisChoice(change) {
  const select = make("select", { id: "axis", onchange(event) { look.axis = event.target.value; change(); } });
  for (const [key, title] of Object.entries(AXES)) select.append(make("option", { value: key }, title));
  select.value = look.axis;
  return make("label", {}, "Against ", select);
}

// A chart of several curves: each {label, x: [...], y: [...]}; points without a number are left out.
function draw(holder, title, curves) {
  const shown = curves.filter((curve) => curve.y.some(isNumber));
  holder.hidden = !shown.length;
  if (!shown.length) { holder.plot?.destroy(); holder.plot = null; return; }
  const data = uPlot.join(shown.map((curve) => {
    const points = curve.x.map((x, k) => [x, curve.y[k]]).filter(([x, y]) => isNumber(x) && isNumber(y));
    points.sort((a, b) => a[0] - b[0]);
    return [points.map((point) => point[0]), points.map((point) => point[1])];
  }));
  const key = `${look.axis} ${shown.map((curve) => curve.label).join("\n")}`;
  if (holder.plot && holder.key === key) { holder.plot.setData(data); return; }
  holder.plot?.destroy();
  const text = getComputedStyle(document.body).color, line = getComputedStyle(document.documentElement).getPropertyValue("--line");
  const style = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line } };
  const marks = (key, values) => values.map((x) => key === "tx_bytes" ? bytes(x) : `${x}`);
  holder.replaceChildren(make("h3", {}, title));
  holder.key = key;
  holder.plot = new uPlot({
    width: holder.clientWidth || 320, height: 220, scales: { x: { time: false } },
    axes: [{ ...style, label: AXES[look.axis], values: (_, found) => marks(look.axis, found) },
      { ...style, size: 62, values: (_, found) => marks(title.startsWith("bytes") ? "tx_bytes" : "", found) }],
    series: [{ label: AXES[look.axis] }, ...shown.map((curve, k) => ({
      label: curve.label, stroke: COLOURS[k % COLOURS.length], width: 1.6, spanGaps: true, points: { show: false },
      dash: k >= COLOURS.length ? [5, 3] : undefined,
    }))],
  }, data, holder);
}

// ---------------------------------------------------------------- one run

function runPage(main, name) {
  const at = make("p", { class: "soft", role: "status", id: "standing" });
  const charts = make("div", { class: "charts" });
  const holders = Object.fromEntries(Object.keys(CHARTS).map((title) => [title, make("div", { class: "chart" })]));
  charts.append(...Object.values(holders));
  const heat = make("canvas", { class: "heat" }), heatBox = make("section", { hidden: true });
  const about = make("section"), events = make("tbody");
  heatBox.append(make("h2", {}, "Nodes"), make("p", { class: "soft" }, "Training loss of each node (rows) over steps: "
    + "dark is low, light is high, empty where a node was absent."), heat);
  const link = (text, path, file) => make("a", { href: path, download: file }, text);
  main.append(make("h2", {}, name), at, make("div", { class: "bar" }, axisChoice(() => show()),
    ...actions(name, at), link("Download records", `/api/runs/${address(name)}/records`, "records.json"),
    link("Download description", `/api/runs/${address(name)}`, "run.json")),
    charts, heatBox, about, make("h2", {}, "Events"),
    make("div", { class: "wide" }, make("table", {}, events)));
  let rows = [], nodes = [], last = -1, over = false, timer = 0;

  function show() {
    const axis = rows.some((row) => isNumber(row[look.axis])) ? look.axis : "step";
    const x = rows.map((row) => row[axis]);
    for (const [title, names] of Object.entries(CHARTS)) {
      draw(holders[title], title, names.map((label) => ({ label, x, y: rows.map((row) => row[label]) })));
    }
    drawNodes();
  }

  function drawNodes() {
    const ids = [...new Set(nodes.map((row) => row.node))].sort((a, b) => a - b);
    heatBox.hidden = !ids.length;
    if (!ids.length) return;
    const steps = [...new Set(nodes.map((row) => row.step))].sort((a, b) => a - b), wide = Math.min(steps.length, 600);
    const place = new Map(steps.map((step, k) => [step, Math.floor(k * wide / steps.length)]));
    const losses = nodes.map((row) => Math.log(Math.max(row.train_loss, 1e-12))).filter(isNumber);
    const low = losses.reduce((a, b) => Math.min(a, b), Infinity);
    const high = losses.reduce((a, b) => Math.max(a, b), -Infinity);
    heat.width = wide; heat.height = ids.length * 6;
    const brush = heat.getContext("2d");
    brush.clearRect(0, 0, heat.width, heat.height);
    for (const row of nodes) {
      if (!isNumber(row.train_loss)) continue;
      const share = (Math.log(Math.max(row.train_loss, 1e-12)) - low) / (high - low || 1);
      brush.fillStyle = `hsl(${210 - 160 * share} 70% ${25 + 50 * share}%)`;
      brush.fillRect(place.get(row.step), ids.indexOf(row.node) * 6, 1, 5);
    }
  }

  function describe(run) {
    over = run.state !== "running";
    const step = run.status.step ?? 0, total = run.status.total_steps ?? "?";
    at.textContent = `${run.state}, step ${step} of ${total}`;
    const facts = make("dl");
    for (const [key, value] of Object.entries(run.description)) {
      if (value === null || key === "model") continue;
      facts.append(make("dt", {}, key), make("dd", {}, typeof value === "object" ? JSON.stringify(value) : value));
    }
    const command = (run.command ?? []).join(" ");
    about.replaceChildren(make("h2", {}, "What it is"), facts, make("h3", {}, "Command"), make("pre", {}, command));
    events.replaceChildren(...run.events.slice(-100).reverse().map((event) => {
      const { at_s, kind, step, ...told } = event;
      return make("tr", {}, make("td", {}, new Date(at_s * 1000).toLocaleTimeString()), make("td", {}, kind),
        make("td", { class: "number" }, step), make("td", {}, JSON.stringify(told)));
    }));
  }

  async function poll() {
    try {
      const run = await get(`/api/runs/${address(name)}`);
      const found = await get(`/api/runs/${address(name)}/records?after=${last}`
        + (last < 0 ? `&most=${10 * MOST_POINTS}` : ""));
      if (found.last < last) { rows = []; nodes = []; last = -1; }  // it goes on from an earlier step
      else {
        for (const row of found.records) (row.node === null ? rows : nodes).push(row);
        last = found.last;
      }
      while (rows.length > 2 * MOST_POINTS) rows = rows.filter((row, k) => k % 2 || isNumber(row.val_loss) && k % 4);
      while (nodes.length > 20 * MOST_POINTS) nodes = nodes.filter((row) => row.step % 2);
      describe(run);
      show();
    } catch (error) { at.textContent = error.message; }
    timer = over ? 0 : setTimeout(poll, POLL_MS);
  }
  poll();
  return { update() { if (over && !timer && list.some((run) => run.name === name && run.state === "running")) poll(); },
    leave() { clearTimeout(timer); over = true; } };
}

// ---------------------------------------------------------------- several

function comparePage(main, names) {
  const wanted = new Set(names), charts = make("div", { class: "charts" }), body = make("tbody");
  const at = make("p", { class: "soft", role: "status" }), acted = make("p", { class: "soft", role: "status" });
  const titles = { "validation loss": "val_loss", accuracy: "val_accuracy", "consensus distance": "consensus_distance" };
  const holders = Object.fromEntries(Object.keys(titles).map((title) => [title, make("div", { class: "chart" })]));
  charts.append(...Object.values(holders));
  main.append(make("h2", {}, `Compare ${names.join(", ")}`), at, make("div", { class: "bar" }, axisChoice(() => show()),
    ...(names.length === 1 ? actions(names[0], acted) : [])), acted,
    charts, make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {},
      ...COLUMNS.map(([, title, , number]) => make("th", { class: number ? "number" : "" }, title)))), body)));
  const curves = new Map();
  let timer = 0, gone = false;

  const short = (label) => label.slice(names.length === 1 ? label.lastIndexOf("/") + 1 : 0);
  const runs = () => list.filter((run) => run.kind === "run" && (wanted.has(run.name)
    || wanted.has(run.name.split("/")[0])));

  function show() {
    for (const [title, column] of Object.entries(titles)) {
      draw(holders[title], title, [...curves].map(([label, { rows }]) => {
        const own = rows.filter((row) => isNumber(row[column]));
        return { label: short(label), x: own.map((row) => row[look.axis]), y: own.map((row) => row[column]) };
      }));
    }
    body.replaceChildren(...runs().map((run) => make("tr", {}, ...COLUMNS.map(([key, , text, number]) =>
      key === "name" ? make("td", {}, make("a", { href: `#/run/${address(run.name)}` }, run.name))
        : make("td", { class: number ? "number" : "" }, text(run))))));
  }

  async function poll() {
    try {
      for (const run of runs().slice(0, 40)) {
        const known = curves.get(run.name);
        if (known && known.state !== "running") continue;
        const found = await get(`/api/runs/${address(run.name)}/records?node=none&most=${MOST_POINTS}`);
        curves.set(run.name, { rows: found.records, state: run.state });
      }
      at.textContent = curves.size ? `${curves.size} runs` : "no runs of that name yet";
      if (!gone) show();
    } catch (error) { at.textContent = error.message; }
    if (!gone) timer = setTimeout(poll, 2 * POLL_MS);
  }
  poll();
  return { update() {}, leave() { gone = true; clearTimeout(timer); } };
}

// ---------------------------------------------------------------- new

async function send(path, body) {
  const answer = await fetch(path, { method: "POST", credentials: "same-origin",
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(body ?? {}) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

// Buttons that stop what runs and go on with what has stopped; for comparisons, sweeps and single runs.
function actions(name, at) {
  const button = (text, what) => make("button", { type: "button", id: what, async onclick() {
    try { await send(`/api/runs/${address(name)}/${what}`); at.textContent = `asked to ${what}`; }
    catch (error) { at.textContent = error.message; }
  } }, text);
  return name.includes("/") ? [] : [button("Stop", "stop"), button("Resume", "resume")];
}

function newPage(main) {
  const at = make("p", { class: "soft", role: "status", id: "answer" }), fields = make("div", { class: "fields" });
  const kind = make("select", { id: "command", onchange: () => show() }), started = make("section");
  const form = make("form", { onsubmit: async (event) => {
    event.preventDefault();
    const options = {};
    for (const field of fields.querySelectorAll("[name]")) {
      if (field.type === "checkbox") { if (field.checked) options[field.name] = true; continue; }
      const lines = field.value.split("\n").map((line) => line.trim()).filter(Boolean);
      if (lines.length) options[field.name] = field.tagName === "TEXTAREA" ? lines : lines[0];
    }
    try {
      const found = await send("/api/start", { command: kind.value, options });
      at.textContent = `started as process ${found.pid}; it appears in the list as soon as it trains`;
    } catch (error) { at.textContent = error.message; }
  } }, make("label", {}, "What ", kind), fields, make("button", { type: "submit", id: "start" }, "Start"));
  main.append(make("h2", {}, "New"), form, at, started);
  let forms = {}, timer = 0;

  function show() {
    fields.replaceChildren(...forms[kind.value].map((option) => {
      const attributes = { name: option.name, id: `option-${option.name}` };
      const field = option.is_flag ? make("input", { ...attributes, type: "checkbox" })
        : option.multiple ? make("textarea", { ...attributes, placeholder: "one on each line", rows: "3" })
          : make("input", { ...attributes, type: "text", placeholder: String(option.default ?? "") });
      if (option.required) field.setAttribute("required", "");
      return make("p", {}, make("label", { for: attributes.id }, option.flag.replace(/^--/, "")), field,
        make("small", {}, option.help));
    }));
  }

  async function poll() {
    try {
      started.replaceChildren(...(await get("/api/started")).map((one) => make("div", {},
        make("h3", {}, `${one.command}, process ${one.pid}: ${one.status === null ? "running" : `ended (${one.status})`}`),
        make("pre", {}, one.output))));
    } catch (error) { at.textContent = error.message; }
    timer = setTimeout(poll, 2 * POLL_MS);
  }
  get("/api/forms").then((found) => {
    forms = found;
    kind.append(...Object.keys(forms).map((name) => make("option", { value: name }, name)));
    if (!kind.value) { form.hidden = true; at.textContent = "This page only reads: it was started with --read-only."; }
    else { show(); poll(); }
  }, (error) => { at.textContent = error.message; });
  return { update() {}, leave() { clearTimeout(timer); } };
}

// ---------------------------------------------------------------- which page

function open() {
  page.leave();
  const main = document.getElementById("main");
  main.replaceChildren();
  const [, kind, ...rest] = location.hash.split("/");
  if (kind === "run") page = runPage(main, rest.map(decodeURIComponent).join("/"));
  else if (kind === "compare") page = comparePage(main, rest.join("/").split("&").map(decodeURIComponent));
  else if (kind === "new") page = newPage(main);
  else page = runsPage(main);
}

function listen() {
  const connection = document.getElementById("connection"), source = new EventSource("/api/events");
  source.addEventListener("runs", (event) => {
    list = JSON.parse(event.data);
    connection.textContent = "live";
    page.update();
  });
  source.onerror = () => { connection.textContent = "not connected: is exogym ui running?"; };
}

addEventListener("hashchange", open);
open();
listen();
