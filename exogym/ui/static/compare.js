// The curves of several runs in the same charts: of chosen runs, a comparison, or a sweep with its cells.

import {
  actionsOf, address, againLink, bytes, figure, find, followed, get, heading, isNumber, look, make, notes, POLL_MS, seconds, share, store,
  optionsOf, table, titled, toAddress,
} from "./base.js";
import { axisChoice, draw, markOf, places, TABS } from "./curves.js";
import { grid } from "./grid.js";
import { cell, COLUMNS } from "./runs.js";
import { beyond, byBytes, byLoss, byName, labelOfRow, spread, times, titleOfRow, verdictOf, winnerOf } from "./verdict.js";

const MOST_POINTS = 1000, MOST_CURVES = 40, MOST_BESIDE = 6, TALL = 360, AT_ONCE = 4;
const LOSS = "validation loss", FRONT = "Pareto front", GRAY = "#8a8a8a", FAINT = "#7F7F7F";  // FAINT: the color of a sweep's cells after the best
const TITLES = { [LOSS]: "val_loss", accuracy: "val_accuracy", "consensus distance": "consensus_distance" };
const ENDS = { [LOSS]: ["val_loss", figure], "sent per node": ["tx_bytes", bytes], "time trained": ["wall_s", seconds] };
const OF_OTHERS = new Set(["strategy.name", "total_steps"]);  // other options say the same
const RUNS = "", STRATEGY = "strategy", SKIPPED = new Set(["model", "data", "placement", "chosen", "shared"]);

// The mean of several runs at the steps that all of them have, with the lowest and the highest.
function together(label, runs, column, axis) {
  const maps = runs.map((rows) => new Map(rows.filter((row) => isNumber(row[column])).map((row) => [row.step, row]))).filter((map) => map.size);
  if (!maps.length) return { label, x: [], y: [] };
  const steps = [...maps[0].keys()].filter((step) => maps.every((map) => map.has(step)));
  const all = (step, name) => maps.map((map) => map.get(step)[name]);
  const mean = (values) => (values.every(isNumber) ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const of = (form) => steps.map((step) => form(all(step, column)));
  return { label, x: steps.map((step) => mean(all(step, axis))), y: of(mean),
    ...(maps.length > 1 ? { low: of((values) => Math.min(...values)), high: of((values) => Math.max(...values)) } : {}) };
}

// A dashed line at a loss, as wide as the curves.
function level(loss, curves, { logx }) {
  const all = curves.flatMap(({ x }) => x).filter((x) => isNumber(x) && (!logx || x > 0));
  return { label: `target ${figure(loss)}`, x: [Math.min(...all), Math.max(...all)], y: [loss, loss], color: GRAY, dash: [2, 2] };
}

// The bytes or seconds to the target loss, or how many runs reached it.
const reached = (row, value, form) => (isNumber(value) ? form(value) : row.target_runs ? `in ${row.target_runs} of ${row.seeds} runs` : "not reached");
const RESULTS = [  // title and text
  ["bytes to target", (row) => reached(row, row.target_bytes, bytes)], [LOSS, (row) => spread(row, "val_loss", figure)],
  ["quality (DDP's loss / its loss)", (row) => spread(row, "quality", share)], ["sent/node", (row) => bytes(row.tx_bytes)],
  ["reduction", (row) => (isNumber(row.reduction) ? `${Number(row.reduction.toPrecision(3))}x` : "")],
  ["time to target", (row) => (isNumber(row.time_s) ? reached(row, row.target_s, seconds) : "")],
  ["predicted time", (row) => seconds(row.time_s)],
];

// The points that no other point beats in both x and y, from left to right.
function frontOf(points) {
  let best = Infinity;
  return [...points].sort((a, b) => a.x - b.x || a.y - b.y).filter(({ y }) => y < best && ((best = y), true));
}

export function comparePage(main, names) {
  const wanted = new Set(names), own = names.length === 1 ? notes(names[0]) : null;
  const { holders, box: charts } = places(Object.keys(TITLES)), front = places([FRONT]), body = make("tbody");
  const at = make("p", { class: "soft", role: "status" }), actions = actionsOf(names[0]), again = againLink(names[0]);
  const head = own ? heading(names[0]) : make("h2"), titles = new Map(), ties = new Map(), isSweep = () => own !== null && find(names[0])?.kind === "sweep";
  const cells = make("section", { hidden: true });
  const verdict = make("p", { id: "verdict", hidden: true }), further = make("details", { id: "further", hidden: true, open: matchMedia("(min-width: 50rem)").matches });
  const lowest = make("p", { id: "lowest", hidden: true });
  const results = make("section", { id: "results", hidden: true });
  const differences = make("section", { id: "differences", hidden: true }), finals = new Map();
  const groups = make("select", { id: "group", onchange(event) { look.group = event.target.value; show(); toAddress("over", "linear", "smooth", "group"); } });
  const [over, choices] = axisChoice("over", { linear: "Linear axes" }, () => show(), make("label", {}, "Group by ", groups), own ? again.link : "");
  const curves = new Map(), described = new Map();
  let members = {}, colors = {}, offered = "", rows = [], hint = "", network = "", target = null, timer = 0, gone = false;

  const first = holders[LOSS], others = make("details", { id: "others", ontoggle() { show(); } }, make("summary", {}, "Accuracy and consensus distance"), charts);
  for (const tall of [first, front.holders[FRONT]]) Object.assign(tall, { tall: TALL, label: LOSS, plain: own !== null && tall !== first });
  const figures = make("section", { id: "figures", hidden: true }, over, make("div", { class: "figures" }, first, front.box), choices);
  const singles = make("details", { id: "singles" }, make("summary", {}, "Single runs"), table(COLUMNS.map(([, title, , number]) => [title, number]), body));
  const rest = make("div", { hidden: true }, others, singles, own ?? "");
  main.append(head, at, own ? actions.box : "", verdict, lowest, further, differences, cells, figures, results, rest);

  const runs = () => store.list.filter((run) => run.kind === "run" && (wanted.has(run.name) || wanted.has(run.name.split("/")[0])));
  const lastOf = (name) => name.split("/").at(-1), titleOf = (name) => titles.get(name) ?? titled(find(name) ?? { name }), twins = (name) => runs().filter((run) => run.name !== name && titleOf(run.name) === titleOf(name)).map((run) => lastOf(run.name));
  // A run's strategy, as everywhere; two runs of one strategy also have their folders' names, and two folders of one name their whole paths.
  const short = (name) => (own ? lastOf(name) : twins(name).length ? `${titleOf(name)} (${twins(name).includes(lastOf(name)) ? name : lastOf(name)})` : titleOf(name));

  const grouping = () => look.group ?? (Object.keys(members).length ? STRATEGY : RUNS);
  const nameOf = (label) => titleOfRow(rows.find((row) => labelOfRow(row) === label) ?? { strategy: label });
  const labelOf = (name) => (grouping() === RUNS ? short(name) : grouping() === STRATEGY && members[name]
    ? members[name] : described.get(name)?.[grouping()] ?? find(name)?.[grouping()] ?? "not said");

  // The color and dash that all pictures give a strategy.
  function lookOf(label) {
    if (!colors[label]) return {};
    const [light, dark, dash] = colors[label];
    return { color: matchMedia("(prefers-color-scheme: dark)").matches ? dark : light, dash, faint: isSweep() && light === FAINT };
  }

  // The options that are not the same in all runs.
  function differing() {
    const all = [...described.values()], names = [...new Set(all.flatMap(Object.keys))];
    return names.filter((name) => new Set(all.map((options) => options[name])).size > 1).sort();
  }

  // Say in a sentence what a few chosen runs come to, and show their results and the options that differ side by side.
  function showDifferences() {
    const all = [...described.keys()].sort((a, b) => names.indexOf(a) - names.indexOf(b)), said = all.map(short);
    if (own === null) head.textContent = all.length > MOST_BESIDE ? `${all.length} runs` : said.join(" and ") || "Compare";
    differences.hidden = own !== null || all.length < 2 || all.length > MOST_BESIDE;
    if (differences.hidden) return;
    const tied = all.map((name) => ties.get(name)), shown = all.map(titleOf);
    const isOpen = tied[0] && tied.every((one) => one === tied[0]) && new Set(shown).size === all.length;
    const caveat = `One seed each${isOpen ? "; over all seeds of the comparison, which ends lower is undecided." : ": train more seeds before you choose."}`;
    const found = all.map(find), tasks = new Set(found.map((run) => run?.task ?? null).filter((task) => task !== null));
    const about = verdictOf(all.map((name, k) => ({ title: said[k], rows: curves.get(name)?.rows ?? [] })), caveat);
    const soFar = about && found.some((run) => run?.state === "running") ? `So far, ${about}` : about;
    const sentence = tasks.size > 1 ? "These runs train different tasks: their losses do not compare." : soFar;
    verdict.hidden = !sentence; verdict.textContent = sentence;
    const row = (title, values, best) => make("tr", {}, make("th", { scope: "row" }, title), ...values.map((value, k) => make("td", { class: `number${k === best ? " best" : ""}` }, value ?? "")));
    const ends = Object.entries(ENDS).map(([title, [name, form]]) => {
      const values = all.map((run) => finals.get(run)?.[name]), least = Math.min(...values.filter(isNumber));
      const ratio = all.length === 2 && values.every(isNumber) && values[0] ? `${times(values[1] / values[0])}x` : "";
      return row(title, [...values.map((value) => form(value)), ratio], values.filter((value) => value === least).length === 1 && !(isOpen && name === "val_loss") ? values.indexOf(least) : -1);
    });
    const options = differing().filter((name) => !OF_OTHERS.has(name)), first = (name) => !name.startsWith("strategy");
    options.sort((a, b) => first(a) - first(b));
    const same = options.length ? "" : make("p", {}, "These runs have the same options.");
    const links = [...all.map((run, k) => [make("a", { href: `#/run/${address(run)}`, title: run }, said[k]), true]), ...(all.length === 2 ? [["ratio", true]] : [])];
    differences.replaceChildren(make("h3", {}, "What differs"), same, table([["", false], ...links],
      make("tbody", {}, ...ends, ...options.map((name) => row(name.replace(/^strategy\./, ""), [...all.map((run) => described.get(run)[name] ?? "\u2013"), ...links.slice(all.length).map(() => "")])))));
  }

  // Offer each option that differs between the runs.
  function offer() {
    const differ = differing(), wanted = [...new Set([RUNS, STRATEGY, ...differ, grouping()])], key = JSON.stringify(wanted);
    if (key !== offered) groups.replaceChildren(...wanted.map((name) => make("option", { value: name }, name || "single runs")));
    offered = key; groups.value = grouping();
  }

  function show() {
    offer();
    showDifferences();
    const lists = new Map(), byStrategy = grouping() === STRATEGY, timed = [...curves.values()].some((curve) => curve.rows.some((row) => isNumber(row.time_s)));
    for (const [name, { rows }] of curves) lists.set(labelOf(name), [...(lists.get(labelOf(name)) ?? []), rows]);
    over.children[2].hidden = !timed;
    const axis = Object.hasOwn(TABS, look.over) && (timed || look.over !== "time_s") ? look.over : "tx_bytes";
    const view = { axis, logx: axis === "tx_bytes" && !look.linear, logy: !look.linear, smooth: look.smooth };
    const order = [...rows].sort(byBytes).map(titleOfRow), placeIn = (label) => order.indexOf(label);
    const seeds = Math.max(0, ...[...lists.values()].map((each) => each.length));
    for (const [title, column] of Object.entries(TITLES)) {
      if (title !== LOSS && !others.open) continue;
      const found = [...lists].map(([label, runs]) => ({ ...together(byStrategy ? nameOf(label) : label, runs, column, axis), ...(byStrategy || own === null ? lookOf(label) : {}) }));
      found.sort((a, b) => Boolean(b.faint) - Boolean(a.faint) || (placeIn(a.label) - placeIn(b.label)) || byName(a.label, b.label));
      if (title === LOSS && byStrategy && isNumber(target)) found.push(level(target, found, view));
      const said = title === LOSS ? `Validation loss over ${TABS[axis].toLowerCase()}${axis === "time_s" && network ? ` on ${network}` : ""}${seeds > 1 ? `, mean of ${seeds} runs, band: lowest to highest` : ""}` : title;
      draw(holders[title], said, found, title === LOSS ? view : { ...view, logy: false });
    }
    figures.hidden = first.hidden; rest.hidden = false;
    showFront(view); front.box.hidden = front.holders[FRONT].hidden;
    if (!body.contains(document.activeElement)) {
      body.replaceChildren(...runs().map((run) => make("tr", {}, ...COLUMNS.map((column) => cell(run, column)))));
    }
  }

  // Each strategy's end as a point: lower left is better.
  function showFront(view) {
    const axis = view.axis === "time_s" ? "time_s" : "tx_bytes", holder = front.holders[FRONT];
    const points = rows.map((row) => ({ label: titleOfRow(row), x: row[axis], y: row.val_loss, std: row.val_loss_std, ...lookOf(labelOfRow(row)) })).filter(({ x, y }) => isNumber(x) && x > 0 && isNumber(y));
    const best = frontOf(points), line = { label: "Pareto front", x: best.map(({ x }) => x), y: best.map(({ y }) => y), color: GRAY, dash: [3, 2] };
    const bar = ({ y, std }) => (isNumber(std) ? { low: [y - std], high: [y + std] } : {});
    const shown = points.length > 1 && grouping() === STRATEGY;
    draw(holder, `Last loss${rows.some((row) => isNumber(row.val_loss_std)) ? " \u00b1 standard deviation" : ""}: lower left is better`, shown ? [...(best.length > 1 ? [line] : []), ...points.map((point) => ({ ...point, x: [point.x], y: [point.y], ...bar(point), named: points.length <= MOST_BESIDE }))] : [],
      { ...view, axis, logx: !look.linear, smooth: 0 });
  }

  // The table is the legend: a row's color is its curve's, and the pointer on a row lets the others fade.
  function showResults() {
    results.hidden = !rows.length;
    const columns = RESULTS.filter(([, text]) => rows.some((row) => text(row)));
    const lowest = rows.reduce((a, b) => ((b.val_loss ?? Infinity) < (a.val_loss ?? Infinity) ? b : a), {}), fewest = Math.min(...rows.map((row) => row.target_bytes ?? Infinity));
    const isBest = (row, title) => (title === LOSS ? row.val_loss - lowest.val_loss <= Math.max(row.val_loss_std ?? 0, lowest.val_loss_std ?? 0) : title === "bytes to target" && row.target_bytes === fewest);
    const line = (row) => {
      const focus = (label) => () => first.focusOn?.(label);
      return make("tr", { onmouseenter: focus(titleOfRow(row)), onmouseleave: focus(null) },
        make("th", { scope: "row" }, markOf({ dash: [], ...lookOf(labelOfRow(row)) }), titleOfRow(row), row.notes ? make("small", { class: "soft" }, row.notes) : ""),
        ...columns.map(([title, text]) => make("td", { class: `number${isBest(row, title) ? " best" : ""}` }, text(row))));
    };
    results.replaceChildren(table([[rows[0]?.cell ? "cell" : "strategy", false], ...columns.map(([title]) => [title, true])], make("tbody", {}, ...[...rows].sort(byBytes).map(line))), network ? make("p", { class: "soft" }, `Times are predicted for ${network}.`) : "");
  }

  async function showVerdict() {
    if (own === null) {
      for (const parent of new Set(names.filter((name) => name.includes("/") && !titles.has(name)).map((name) => name.split("/")[0]))) {
        const { members = {}, rows = [], colors: looks, undecided = {} } = await get(`/api/runs/${address(parent)}/verdict`).catch(() => ({}));
        for (const [name, label] of Object.entries(members)) {
          titles.set(name, titleOfRow(rows.find((row) => labelOfRow(row) === label) ?? { strategy: label }));
          if (undecided.val_loss?.includes(label)) ties.set(name, parent);
          if (looks[label][0] !== FAINT) colors[titles.get(name)] = looks[label];
        }
      }
      return;
    }
    const found = await get(`/api/runs/${address(names[0])}/verdict`), best = isSweep() && winnerOf(found, "sweep", true);
    const parts = (found.verdict ?? "").split(/(?<=[.;])\s+/), base = found.rows?.find((row) => row.strategy === "ddp"), isMean = found.target?.endsWith("of DDP's quality") && base?.target_runs < base?.seeds;
    const sentence = best ? `${best}.` : parts.shift(), low = best ? hint : parts.pop() ?? "";
    const rest = best ? found.verdict : [...parts, isMean ? "Not every run of DDP reaches the target, because the target follows from DDP's mean loss over the seeds." : ""].join(" ").trim();
    lowest.hidden = !low; lowest.textContent = low; network = found.network ?? "";
    members = found.members ?? {}; colors = found.colors ?? {}; rows = found.rows ?? []; target = found.target_loss;
    verdict.hidden = !sentence; verdict.textContent = sentence?.replace(/;$/, ".") ?? "";
    further.hidden = !rest; verdict.classList.toggle("none", !best && !rows.some((row) => row.target_bytes));
    if (rest && further.textContent !== `More${rest}`) further.replaceChildren(make("summary", {}, "More"), make("p", {}, rest));
    showResults();
  }

  async function showGrid() {
    if (!isSweep()) return;
    const found = await get(`/api/runs/${address(names[0])}/grid`);
    const fill = () => cells.replaceChildren(...grid(found, fill, (label) => first.focusOn?.(label && nameOf(label))));
    cells.hidden = !found.cells; hint = beyond(found);
    if (found.cells && !cells.contains(document.activeElement)) fill();
  }

  async function poll() {
    try {
      await showVerdict(); await showGrid();
      const places = new Map([...rows].sort(byLoss).map((row, k) => [labelOfRow(row), k])), placeOf = (run) => places.get(members[run.name]) ?? places.size;
      const shown = runs().sort((a, b) => placeOf(a) - placeOf(b)).slice(0, MOST_CURVES);
      const load = async (run) => {
        if (!described.has(run.name)) {
          const { description = {}, strategy, summary } = await get(`/api/runs/${address(run.name)}`).catch(() => ({}));
          described.set(run.name, { ...Object.fromEntries(optionsOf(description).filter(([key]) => !SKIPPED.has(key)).map(([, option, text]) => [option, text])), strategy });
          finals.set(run.name, summary);
        }
        const known = curves.get(run.name) ?? { next: followed(run.name, MOST_POINTS), rows: [], more: true };
        if (!known.more && known.state === run.state && run.state !== "running") return;
        const found = await known.next().catch(() => ({ more: false }));  // the run's row gives the reason
        curves.set(run.name, { ...known, ...found, state: run.state });
      };
      for (let k = 0; k < shown.length && !gone; k += AT_ONCE) {
        await Promise.all(shown.slice(k, k + AT_ONCE).map(load));
        show();
      }
      if (own !== null) {
        const found = await get(`/api/runs/${address(names[0])}`);
        actions.show(found.actions); again.show(found); head.fill(found); own.fill(found);
      }
      const all = runs().length, few = all > curves.size ? `, showing curves of ${rows.length ? "the best" : "the first"} ${curves.size}` : "";
      const state = own ? find(names[0])?.state : null;
      const missing = own ? [] : names.filter((name) => !find(name)), not = missing.length ? `; found no ${missing.join(", ")}` : "";
      at.textContent = curves.size ? `${state ? `${state}, ` : ""}${all} runs${few}${not}` : "No runs of this name yet.";
      if (!gone) show();
    } catch (error) { at.textContent = error.message; }
    const more = [...curves.values()].some((curve) => curve.more);
    if (!gone) timer = setTimeout(poll, more ? 0 : 2 * POLL_MS);
  }
  poll();
  return { update() {}, leave() { gone = true; clearTimeout(timer); } };
}
