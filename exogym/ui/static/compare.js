// The curves of several runs in the same charts: of chosen runs, a comparison, or a sweep with its cells.

import {
  actionsOf, address, againLink, bytes, figure, find, followed, get, heading, isNumber, look, make, notes, POLL_MS, seconds, share, store,
  optionsOf, table, toAddress,
} from "./base.js";
import { axisChoice, draw, markOf, places, TABS } from "./curves.js";
import { grid } from "./grid.js";
import { cell, COLUMNS } from "./runs.js";

const MOST_POINTS = 1000, MOST_CURVES = 40, MOST_BESIDE = 6, TALL = 360;
const LOSS = "validation loss", FRONT = "Pareto front", GRAY = "#8a8a8a";
const TITLES = { [LOSS]: "val_loss", accuracy: "val_accuracy", "consensus distance": "consensus_distance" };
const ENDS = { [LOSS]: ["val_loss", figure], "sent per node": ["tx_bytes", bytes], "time trained": ["wall_s", seconds] };
const OF_OTHERS = new Set(["strategy", "total_steps"]);  // other options say the same
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

const labelOfRow = (row) => row.cell ?? row.strategy;
const titleOfRow = (row) => row.title ?? labelOfRow(row);
const spread = (row, name, form) => (isNumber(row[name]) ? form(row[name]) + (isNumber(row[`${name}_std`]) ? ` \u00b1 ${form(row[`${name}_std`])}` : "") : "");
// The bytes or seconds to the target loss, or how many runs reached it.
const reached = (row, value, form) => (isNumber(value) ? form(value) : row.target_runs ? `in ${row.target_runs} of ${row.seeds} runs` : "not reached");
const RESULTS = [  // title and text
  ["bytes to target", (row) => reached(row, row.target_bytes, bytes)], [LOSS, (row) => spread(row, "val_loss", figure)],
  ["quality", (row) => spread(row, "quality", share)], ["sent/node", (row) => bytes(row.tx_bytes)],
  ["reduction", (row) => (isNumber(row.reduction) ? `${Number(row.reduction.toPrecision(3))}x` : "")],
  ["time to target", (row) => (isNumber(row.time_s) ? reached(row, row.target_s, seconds) : "")],
  ["predicted time", (row) => seconds(row.time_s)],
];
// Who needs the fewest bytes to the target comes first, then who reached it in some runs, then by loss.
const rank = (row) => [isNumber(row.target_bytes) ? 0 : row.target_runs ? 1 : 2, row.target_bytes ?? 0, row.val_loss ?? Infinity];
const byBytes = (a, b) => rank(a).map((x, k) => x - rank(b)[k]).find((x) => x) ?? 0;

// The points that no other point beats in both x and y, from left to right.
function frontOf(points) {
  let best = Infinity;
  return [...points].sort((a, b) => a.x - b.x || a.y - b.y).filter(({ y }) => y < best && ((best = y), true));
}

export function comparePage(main, names) {
  const wanted = new Set(names), own = names.length === 1 ? notes(names[0]) : null;
  const { holders, box: charts } = places(Object.keys(TITLES)), front = places([FRONT]), body = make("tbody");
  const at = make("p", { class: "soft", role: "status" }), actions = actionsOf(names[0]), again = againLink(names[0]);
  const head = own ? heading(names[0]) : make("h2", {}, `Compare ${names.join(", ")}`);
  const cells = make("section", { hidden: true });
  const verdict = make("p", { id: "verdict", hidden: true }), further = make("details", { id: "further", hidden: true, open: true });
  const results = make("section", { id: "results", hidden: true });
  const differences = make("section", { id: "differences", hidden: true }), finals = new Map();
  const groups = make("select", { id: "group", onchange(event) { look.group = event.target.value; show(); toAddress("over", "linear", "smooth", "group"); } });
  const [over, choices] = axisChoice("over", { linear: "Linear axes" }, () => show(), make("label", {}, "Group by ", groups), own ? again.link : "");
  const curves = new Map(), described = new Map();
  let members = {}, colors = {}, offered = "", rows = [], target = null, timer = 0, gone = false;

  const first = holders[LOSS], others = make("details", { id: "others", ontoggle() { show(); } }, make("summary", {}, "Accuracy and consensus distance"), charts);
  for (const tall of [first, front.holders[FRONT]]) Object.assign(tall, { tall: TALL, plain: own !== null && tall !== first });
  const figures = make("section", { id: "figures", hidden: true }, over, make("div", { class: "figures" }, first, front.box), choices);
  const singles = make("details", { id: "singles", open: own === null }, make("summary", {}, "Single runs"), table(COLUMNS.map(([, title, , number]) => [title, number]), body));
  const rest = make("div", { hidden: true }, others, singles, own ?? "");
  main.append(head, at, own ? actions.box : "", verdict, further, differences, cells, figures, results, rest);

  const short = (label) => label.slice(names.length === 1 ? label.lastIndexOf("/") + 1 : 0);
  const runs = () => store.list.filter((run) => run.kind === "run" && (wanted.has(run.name) || wanted.has(run.name.split("/")[0])));

  const grouping = () => look.group ?? (Object.keys(members).length ? STRATEGY : RUNS);
  const nameOf = (label) => titleOfRow(rows.find((row) => labelOfRow(row) === label) ?? { strategy: label });
  const labelOf = (name) => (grouping() === RUNS ? short(name) : grouping() === STRATEGY && members[name]
    ? members[name] : described.get(name)?.[grouping()] ?? find(name)?.[grouping()] ?? "not said");

  // The color and dash that all pictures give a strategy.
  function lookOf(label) {
    if (!colors[label]) return {};
    const [light, dark, dash] = colors[label];
    return { color: matchMedia("(prefers-color-scheme: dark)").matches ? dark : light, dash };
  }

  // The options that are not the same in all runs.
  function differing() {
    const all = [...described.values()], names = [...new Set(all.flatMap(Object.keys))];
    return names.filter((name) => new Set(all.map((options) => options[name])).size > 1).sort();
  }

  // Show a few chosen runs side by side: their results, and the options that differ.
  function showDifferences() {
    const all = [...described.keys()].sort((a, b) => names.indexOf(a) - names.indexOf(b));
    differences.hidden = own !== null || all.length < 2 || all.length > MOST_BESIDE;
    if (differences.hidden) return;
    const row = (title, values) => make("tr", {}, make("td", {}, title), ...values.map((value) => make("td", { class: "number" }, value ?? "")));
    const ends = Object.entries(ENDS).map(([title, [name, form]]) => row(title, all.map((run) => form(finals.get(run)?.[name]))));
    const options = differing().filter((name) => !OF_OTHERS.has(name));
    const same = options.length ? "" : make("p", {}, "These runs have the same options.");
    differences.replaceChildren(make("h3", {}, "What differs"), same, table([["", false], ...all.map((run) => [short(run), true])],
      make("tbody", {}, ...options.map((name) => row(name, all.map((run) => described.get(run)[name]))), ...ends)));
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
    const seeds = Math.max(0, ...[...lists.values()].map((each) => each.length));
    for (const [title, column] of Object.entries(TITLES)) {
      if (title !== LOSS && !others.open) continue;
      const found = [...lists].map(([label, runs]) => ({ ...together(byStrategy ? nameOf(label) : label, runs, column, axis), ...(byStrategy ? lookOf(label) : {}) }));
      if (title === LOSS && byStrategy && isNumber(target)) found.push(level(target, found, view));
      const said = title === LOSS ? `Validation loss over ${TABS[axis].toLowerCase()}${seeds > 1 ? `, mean of ${seeds} runs, band: lowest to highest` : ""}` : title;
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
    results.replaceChildren(table([[rows[0]?.cell ? "cell" : "strategy", false], ...columns.map(([title]) => [title, true])], make("tbody", {}, ...[...rows].sort(byBytes).map(line))));
  }

  async function showVerdict() {
    if (own === null) return;
    const found = await get(`/api/runs/${address(names[0])}/verdict`), [, sentence, rest] = (found.verdict ?? "").match(/^(.*?[.;])(?:\s+(.*))?$/s) ?? [];
    members = found.members ?? {}; colors = found.colors ?? {}; rows = found.rows ?? []; target = found.target_loss;
    verdict.hidden = !sentence; verdict.textContent = sentence?.replace(/;$/, ".") ?? "";
    further.hidden = !rest; verdict.classList.toggle("none", /^No strategy/.test(sentence ?? ""));
    if (rest && further.textContent !== `More${rest}`) further.replaceChildren(make("summary", {}, "More"), make("p", {}, rest));
    showResults();
  }

  async function showGrid() {
    if (own === null || find(names[0])?.kind !== "sweep") return;
    const found = await get(`/api/runs/${address(names[0])}/grid`);
    const fill = () => cells.replaceChildren(...grid(found, fill, (label) => first.focusOn?.(label && nameOf(label))));
    cells.hidden = !found.cells;
    if (found.cells && !cells.contains(document.activeElement)) fill();
  }

  async function poll() {
    try {
      await showVerdict();
      for (const run of runs().slice(0, MOST_CURVES)) {
        if (!described.has(run.name)) {
          const { description = {}, strategy, summary } = await get(`/api/runs/${address(run.name)}`).catch(() => ({}));
          described.set(run.name, { ...Object.fromEntries(optionsOf(description).filter(([key]) => !SKIPPED.has(key)).map(([, option, text]) => [option, text])), strategy });
          finals.set(run.name, summary);
        }
        const known = curves.get(run.name) ?? { next: followed(run.name, MOST_POINTS), rows: [], more: true };
        if (!known.more && known.state === run.state && run.state !== "running") continue;
        const found = await known.next().catch(() => ({ more: false }));  // the run's row gives the reason
        curves.set(run.name, { ...known, ...found, state: run.state });
      }
      if (own !== null) {
        const found = await get(`/api/runs/${address(names[0])}`);
        actions.show(found.actions); again.show(found); head.fill(found); own.fill(found);
      }
      const all = runs().length, few = all > curves.size ? `, showing curves of the first ${curves.size}` : "";
      const state = own ? find(names[0])?.state : null;
      const missing = own ? [] : names.filter((name) => !find(name)), not = missing.length ? `; found no ${missing.join(", ")}` : "";
      at.textContent = curves.size ? `${state ? `${state}, ` : ""}${all} runs${few}${not}` : "No runs of this name yet.";
      if (!gone) { show(); await showGrid(); }
    } catch (error) { at.textContent = error.message; }
    const more = [...curves.values()].some((curve) => curve.more);
    if (!gone) timer = setTimeout(poll, more ? 0 : 2 * POLL_MS);
  }
  poll();
  return { update() {}, leave() { gone = true; clearTimeout(timer); } };
}
