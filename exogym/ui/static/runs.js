// The list of runs.

import { address, ageOf, bytes, figure, get, isNumber, look, make, PART_BYTES, seconds, share, skeleton, spark, stateOf, store, strategiesOf, titled, toAddress } from "./base.js";
import { byLoss, spread, winnerOf } from "./verdict.js";

const MOST_ROWS = 300, MOST_POINTS = 60;  // rows at first, points of a sparkline
const MOST_AT_ONCE = 4, NEWER = 1.05, NODES_MS = 5000;  // sparklines asked for; a curve is asked for again when it is 5 % longer, nodes after 5 s
const DEMO = "#/new?line=compare+--strategies+ddp,diloco:H=10,sparta+--nodes+4+--steps+400";
const known = new Map(), nodes = new Map(), open = new Set();
let most = MOST_ROWS, asking = 0, waiting = [];

// A run's small curve and a comparison's verdict are asked for when the row comes into view.
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) { seen.unobserve(target); waiting.push(target); }
  next();
});
function next() {
  waiting = waiting.filter((box) => box.isConnected);
  while (asking < MOST_AT_ONCE && waiting.length) fetched(waiting.shift());
}
async function fetched(box) {
  const { run } = box, { step = Infinity } = known.get(run.name) ?? {}, path = `/api/runs/${address(run.name)}`;
  if (run.kind === "run" && run.state === "running" && !(performance.now() - nodes.get(run.name)?.at < NODES_MS)) {
    nodes.set(run.name, { ...nodes.get(run.name), at: performance.now() });
    get(`${path}/nodes?most_bytes=${PART_BYTES}`).then(({ health, trouble }) => { Object.assign(nodes.get(run.name), { health, trouble }); fill(run); }).catch(() => {});
  }
  if (run.step === step || (run.state === "running" && run.step > step && run.step < NEWER * step)) return;
  asking += 1;
  try {
    const found = await get(`${path}/${run.kind === "run" ? `records?node=none&after=-1&most=${MOST_POINTS}` : "verdict"}`), records = found.records ?? [];
    known.set(run.name, { step: run.step, found, losses: ["val_loss", "train_loss"].map((key) => records.map((row) => row[key]).filter((y) => isNumber(y) && y > 0)).find((all) => all.length > 1)?.map(Math.log) ?? [] });
    fill(run);
  } catch { /* the row says what is wrong */ } finally { asking -= 1; next(); }
}
function fill(run) {
  for (const one of document.querySelectorAll(".later")) if (one.run.name === run.name) one.replaceChildren(one.content(run));
}
function curve(run) {
  const losses = known.get(run.name)?.losses ?? [];
  return losses.length < 2 ? "" : spark(losses);
}
function later(run, kind, content) {
  if (run.step === null) return "";
  const box = Object.assign(make(kind, { class: "later" }, content(run)), { run, content });
  seen.observe(box);
  return box;
}
const lossOf = (run) => spread([...(known.get(run.name)?.found.rows ?? [])].sort(byLoss)[0] ?? {}, "val_loss", (loss) => figure(loss, 3));
const winner = (run) => winnerOf(known.get(run.name)?.found ?? {}, run.kind);

// How far a run is, and about how long it takes yet.
function progress(run) {
  if (run.step === null || !run.total_steps) return "";
  const text = `${run.step}/${run.total_steps}`;
  if (run.state !== "running") return text;
  const left = run.step > 0 && isNumber(run.wall_s) ? `${seconds(run.wall_s * (run.total_steps - run.step) / run.step)} left` : "";
  return make("span", {}, text, make("progress", { max: run.total_steps, value: run.step, "aria-label": text }), make("small", { class: "soft" }, left));
}

export const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["state", "state", (run) => run.state],
  ["strategy", "strategy", strategiesOf],
  ["step", "progress", progress, true],
  ["loss", "loss", (run) => (run.kind === "run" ? make("span", {}, later(run, "span", curve), figure(run.loss, 3)) : later(run, "span", lossOf)), true],
  ["tx_bytes", "sent/node", (run) => bytes(run.tx_bytes), true],
  ["wall_s", "time", (run) => seconds(run.wall_s), true],
  ["started_s", "seen", ageOf, true],
];

const FURTHER = [  // columns that a reader may add
  ["task", "task", (run) => run.task],
  ["accuracy", "accuracy", (run) => share(run.accuracy), true],
  ["time_s", "predicted time", (run) => seconds(run.time_s), true],
  ["kind", "kind", (run) => run.kind],
  ["note", "note", (run) => run.note],
];

// The columns that the address names; otherwise the usual ones. The run's name is always there.
function columns() {
  const wanted = look.columns.split(",");
  return look.columns ? [...COLUMNS, ...FURTHER].filter(([key]) => key === "name" || wanted.includes(key)) : COLUMNS;
}

export function cell(run, [key, title, text, number]) {
  if (key === "name") {
    const way = run.kind === "run" ? `#/run/${address(run.name)}` : `#/compare/${encodeURIComponent(run.name)}`, name = titled(run);
    return make("td", { class: `name${run.name.includes("/") ? " child" : ""}`, title: run.reason ?? run.note }, make("a", { href: way }, name),
      ...run.tags.map((tag) => make("span", { class: "tag" }, tag)), name === run.name ? "" : make("small", { class: "soft" }, run.name), run.kind === "run" ? "" : later(run, "small", winner));
  }
  if (key === "state") return make("td", { class: "state-of" }, later(run, "b", ({ state, name }) => stateOf(state, nodes.get(name))) || stateOf(run.state));
  return make("td", { class: number ? "number" : "text", "data-head": title }, text(run));
}

export function runsPage(main) {
  const body = make("tbody", { class: "runs" }), head = make("tr"), count = make("p", { class: "soft", role: "status" });
  const compare = make("button", { type: "button", id: "compare", onclick() {
    location.hash = `#/compare/${[...store.chosen].map(encodeURIComponent).join("&")}`;
  } }, "Compare selected");
  const filter = make("input", { type: "search", id: "filter", placeholder: "name, strategy, task, tag, note",
    oninput(event) { look.text = event.target.value; show(); keep(); } });
  filter.value = look.text;
  const states = make("select", { id: "state", onchange(event) { look.state = event.target.value; show(); keep(); } });
  for (const state of ["", "running", "done", "stopped", "failed", "lost", "unreadable"]) {
    states.append(make("option", { value: state }, state || "all"));
  }
  states.value = look.state;
  const inside = make("input", { type: "checkbox", id: "inside", onchange(event) {
    look.inside = event.target.checked; show(); keep();
  } });
  inside.checked = look.inside;
  const more = make("button", { type: "button", onclick() { most += MOST_ROWS; show(); } }, "Show more");
  const start = make("p", { id: "start", hidden: true }, make("a", { class: "button", href: DEMO }, "Compare three strategies on digits"), " or run ", make("code", {}, "exogym demo"), " in a terminal.");
  const bar = make("div", { class: "bar" }, make("label", {}, "Filter ", filter), make("label", {}, "State ", states),
  make("label", {}, inside, " Show runs inside comparisons and sweeps"), compare, chooser());
  const box = make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), body));
  main.append(bar, count, start, box, more);

  const keep = () => toAddress("text", "state", "sort", "down", "inside", "columns");

  function chooser() {
    const box = (key, title) => make("label", {}, make("input", { type: "checkbox", id: `column-${key}`,
      checked: columns().some(([each]) => each === key), onchange({ target }) {
        const usual = COLUMNS.map(([each]) => each).join(","), now = new Set(columns().map(([each]) => each));
        if (target.checked) now.add(key); else now.delete(key);
        const keys = [...COLUMNS, ...FURTHER].map(([each]) => each).filter((each) => now.has(each)).join(",");
        look.columns = keys === usual ? "" : keys;
        heads(); show(); keep();
      } }), ` ${title}`);
    return make("details", { id: "columns" }, make("summary", { class: "soft" }, "Columns"),
      make("div", { class: "choices" }, ...[...COLUMNS, ...FURTHER].slice(1).map(([key, title]) => box(key, title))));
  }

  function heads() {
    const focused = head.querySelector(":focus")?.dataset.key;
    head.replaceChildren(make("th", {}, ""), ...columns().map(([key, title, , number]) => {
      const sorted = look.sort === key ? (look.down ? "descending" : "ascending") : "none";
      const button = make("button", { type: "button", "data-key": key, onclick() {
        look.down = look.sort === key ? !look.down : true; look.sort = key; heads(); show(); keep();
      } }, title + (sorted === "none" ? "" : look.down ? " \u2193" : " \u2191"));
      return make("th", { "aria-sort": sorted, class: number ? "number" : "", scope: "col" }, button);
    }));
    if (focused) head.querySelector(`[data-key="${focused}"]`).focus();
  }

  function show() {
    const words = look.text.toLowerCase().split(/\s+/).filter(Boolean);
    const said = (run) => `${titled(run)} ${run.name} ${run.strategy} ${run.task} ${run.tags.join(" ")} ${run.note}`.toLowerCase();
    const found = store.list.filter((run) => (!look.state || run.state === look.state)
      && (look.inside || words.length || !run.name.includes("/") || open.has(run.name.split("/")[0])) && words.every((word) => said(run).includes(word)));
    const way = look.down ? -1 : 1;
    if (look.sort !== "started_s" || !look.down) {  // the list is sorted: newest first, each parent before its runs
      found.sort((a, b) => {
        const [x, y] = [a[look.sort], b[look.sort]];
        if (x === null || y === null) return (x === null) - (y === null);
        return way * (x < y ? -1 : x > y ? 1 : 0);
      });
    }
    count.textContent = !store.known ? "Loading the list of runs." : !store.list.length
      ? "No runs yet. Runs of exogym compare and fit(run_dir=...) appear here as soon as they begin."
      : `${found.length} of ${store.list.length} runs, comparisons and sweeps`;
    start.hidden = !store.known || store.list.length > 0;
    bar.hidden = !store.list.length;
    box.hidden = store.known && !store.list.length;
    if (!store.known) {
      body.replaceChildren(make("tr", {}, make("td", { colspan: `${columns().length + 1}` }, skeleton())));
      more.hidden = compare.disabled = true;
      return;
    }
    const keyOf = (one) => one.getAttribute("aria-label") ?? one.getAttribute("href");
    const held = body.contains(document.activeElement) ? keyOf(document.activeElement) : null;
    body.replaceChildren(...found.slice(0, most).map((run) => {
      const box = make("input", { type: "checkbox", "aria-label": `select ${run.name}`, onchange(event) {
        if (event.target.checked) store.chosen.add(run.name); else store.chosen.delete(run.name);
        compare.disabled = !store.chosen.size;
      } });
      box.checked = store.chosen.has(run.name);
      const isOpen = open.has(run.name), unfold = run.kind === "run" || look.inside ? "" : make("button", { type: "button", class: "quiet fold",
        "aria-expanded": String(isOpen), "aria-label": `runs of ${run.name}`, onclick() { if (!open.delete(run.name)) open.add(run.name); show(); } }, isOpen ? "\u25BE" : "\u25B8");
      return make("tr", {}, make("td", { class: "pick" }, box, unfold), ...columns().map((column) => cell(run, column)));
    }));
    if (held) [...body.querySelectorAll("a, input, button")].find((one) => keyOf(one) === held)?.focus();
    if (!performance.getEntriesByName("listed").length) performance.mark("listed");  // the time to the first list
    more.hidden = found.length <= most;
    compare.disabled = !store.chosen.size;
  }
  heads();
  show();
  return { update: show, leave() {} };
}
