// The curves of several runs in the same charts: of chosen runs, a comparison, or a sweep with its cells.

import {
  actionsOf, address, againLink, bytes, figure, find, followed, get, isNumber, look, make, notes, POLL_MS, seconds, share, store, table,
  toAddress,
} from "./base.js";
import { axisChoice, draw, places } from "./curves.js";
import { grid } from "./grid.js";
import { cell, COLUMNS } from "./runs.js";

const MOST_POINTS = 1000, MOST_CURVES = 40, MOST_BESIDE = 6;
const TITLES = { "validation loss": "val_loss", accuracy: "val_accuracy", "consensus distance": "consensus_distance" };

const ENDS = { "validation loss": ["val_loss", figure], "sent per node": ["tx_bytes", bytes], "time trained": ["wall_s", seconds] };

const OF_OTHERS = new Set(["strategy", "total_steps"]);  // other options say the same

const RUNS = "", STRATEGY = "strategy", SKIPPED = new Set(["model", "data", "placement", "chosen", "shared"]);

// The options of a run by name, each as a text; a strategy's own as strategy.NAME.
function optionsOf(description) {
  const found = {};
  for (const [key, value] of Object.entries(description)) {
    if (SKIPPED.has(key) || value === null) continue;
    if (typeof value !== "object") found[key] = `${value}`;
    else if (Array.isArray(value)) found[key] = JSON.stringify(value);
    else for (const [name, one] of Object.entries(value)) found[key === "limits" ? name : `${key}.${name}`] = typeof one === "object" ? JSON.stringify(one) : `${one}`;
  }
  return found;
}

// The mean of several runs at the steps that all of them have, with the lowest and the highest.
function together(label, runs, column) {
  const maps = runs.map((rows) => new Map(rows.filter((row) => isNumber(row[column])).map((row) => [row.step, row]))).filter((map) => map.size);
  if (!maps.length) return { label, x: [], y: [] };
  const steps = [...maps[0].keys()].filter((step) => maps.every((map) => map.has(step)));
  const all = (step, name) => maps.map((map) => map.get(step)[name]);
  const mean = (values) => (values.every(isNumber) ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const of = (form) => steps.map((step) => form(all(step, column)));
  return { label: maps.length > 1 ? `${label} (${maps.length} runs)` : label, x: steps.map((step) => mean(all(step, look.axis))), y: of(mean),
    ...(maps.length > 1 ? { low: of((values) => Math.min(...values)), high: of((values) => Math.max(...values)) } : {}) };
}

const spread = (row, name, form) => (isNumber(row[name]) ? form(row[name]) + (isNumber(row[`${name}_std`]) ? ` \u00b1 ${form(row[`${name}_std`])}` : "") : "");
// The bytes or seconds to the target loss, or how many runs reached it.
const reached = (row, value, form) => (isNumber(value) ? form(value) : row.target_runs ? `in ${row.target_runs} of ${row.seeds} runs` : "not reached");
const RESULTS = [
  ["strategy", false, (row) => row.title ?? row.cell ?? row.strategy], ["seeds", true, (row) => row.seeds],
  ["validation loss", true, (row) => spread(row, "val_loss", figure)], ["quality", true, (row) => spread(row, "quality", share)],
  ["sent/node", true, (row) => bytes(row.tx_bytes)], ["reduction", true, (row) => (isNumber(row.reduction) ? `${Number(row.reduction.toPrecision(3))}x` : "")],
  ["bytes to target", true, (row) => reached(row, row.target_bytes, bytes)],
  ["time to target", true, (row) => (isNumber(row.time_s) ? reached(row, row.target_s, seconds) : "")],
  ["predicted time", true, (row) => seconds(row.time_s)], ["notes", false, (row) => row.notes],
];

export function comparePage(main, names) {
  const wanted = new Set(names), { holders, box: charts } = places(Object.keys(TITLES)), body = make("tbody");
  const at = make("p", { class: "soft", role: "status" }), actions = actionsOf(names[0]), again = againLink(names[0]);
  const cells = make("section", { hidden: true }), own = names.length === 1 ? notes(names[0]) : null;
  const verdict = make("p", { id: "verdict", hidden: true }), results = make("section", { hidden: true });
  const differences = make("section", { id: "differences", hidden: true }), finals = new Map();
  const groups = make("select", { id: "group", onchange(event) { look.group = event.target.value; show(); keep(); } });
  const keep = () => toAddress("axis", "logx", "logy", "smooth", "group"), described = new Map();
  let members = {}, colors = {}, offered = "";
  main.append(make("h2", {}, names.length === 1 ? names[0] : `Compare ${names.join(", ")}`), at,
    verdict, results, differences, own ? actions.box : "", make("div", { class: "bar" }, make("label", {}, "Group by ", groups), axisChoice(() => show()), own ? again.link : ""),
    charts, cells, table(COLUMNS.map(([, title, , number]) => [title, number]), body), own ?? "");
  const curves = new Map();
  let timer = 0, gone = false;

  const short = (label) => label.slice(names.length === 1 ? label.lastIndexOf("/") + 1 : 0);
  const runs = () => store.list.filter((run) => run.kind === "run" && (wanted.has(run.name)
    || wanted.has(run.name.split("/")[0])));

  const grouping = () => look.group ?? (Object.keys(members).length ? STRATEGY : RUNS);
  const labelOf = (name) => (grouping() === RUNS ? short(name) : grouping() === STRATEGY && members[name]
    ? members[name] : described.get(name)?.[grouping()] ?? find(name)?.[grouping()] ?? "not said");

  // The color and dash that all pictures give a strategy.
  function lookOf(label) {
    if (grouping() !== STRATEGY || !colors[label]) return {};
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
    const lists = new Map();
    for (const [name, { rows }] of curves) lists.set(labelOf(name), [...(lists.get(labelOf(name)) ?? []), rows]);
    for (const [title, column] of Object.entries(TITLES)) {
      draw(holders[title], title, [...lists].map(([label, runs]) => ({ ...together(label, runs, column), ...lookOf(label) })));
    }
    if (!body.contains(document.activeElement)) {
      body.replaceChildren(...runs().map((run) => make("tr", {}, ...COLUMNS.map((column) => cell(run, column)))));
    }
  }

  async function showVerdict() {
    if (own === null) return;
    const found = await get(`/api/runs/${address(names[0])}/verdict`), rows = found.rows ?? [];
    members = found.members ?? {}; colors = found.colors ?? {};
    verdict.hidden = !found.verdict; verdict.textContent = found.verdict ?? "";
    results.hidden = !rows.length;
    const columns = RESULTS.filter(([, , text]) => rows.some((row) => text(row)));
    results.replaceChildren(table(columns.map(([title, number]) => [title, number]), make("tbody", {}, ...rows.map((row) => make("tr", {},
      ...columns.map(([, number, text]) => make("td", { class: number ? "number" : "" }, text(row))))))));
  }

  async function showGrid() {
    if (own === null || find(names[0])?.kind !== "sweep") return;
    const found = await get(`/api/runs/${address(names[0])}/grid`);
    const fill = () => cells.replaceChildren(make("h2", {}, "Cells"), ...grid(found, fill));
    cells.hidden = !found.cells;
    if (found.cells && !cells.contains(document.activeElement)) fill();
  }

  async function poll() {
    try {
      await showVerdict();
      for (const run of runs().slice(0, MOST_CURVES)) {
        if (!described.has(run.name)) {
          const { description = {}, strategy, summary } = await get(`/api/runs/${address(run.name)}`).catch(() => ({}));
          described.set(run.name, { ...optionsOf(description), strategy });
          finals.set(run.name, summary);
        }
        const known = curves.get(run.name) ?? { next: followed(run.name, MOST_POINTS), rows: [], more: true };
        if (!known.more && known.state === run.state && run.state !== "running") continue;
        const found = await known.next().catch(() => ({ more: false }));  // the run's row gives the reason
        curves.set(run.name, { ...known, ...found, state: run.state });
      }
      if (own !== null) {
        const found = await get(`/api/runs/${address(names[0])}`);
        actions.show(found.actions); again.show(found);
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
  return { update() { own?.fill(); }, leave() { gone = true; clearTimeout(timer); } };
}
