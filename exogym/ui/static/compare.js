// The curves of several runs in the same charts: of chosen runs, a comparison, or a sweep with its cells.

import { actionsOf, address, find, followed, get, isNumber, look, make, notes, POLL_MS, store, table } from "./base.js";
import { axisChoice, draw, places } from "./curves.js";
import { grid } from "./grid.js";
import { cell, COLUMNS } from "./runs.js";

const MOST_POINTS = 1000, MOST_CURVES = 40;
const TITLES = { "validation loss": "val_loss", accuracy: "val_accuracy", "consensus distance": "consensus_distance" };

export function comparePage(main, names) {
  const wanted = new Set(names), { holders, box: charts } = places(Object.keys(TITLES)), body = make("tbody");
  const at = make("p", { class: "soft", role: "status" }), actions = actionsOf(names[0]);
  const cells = make("section", { hidden: true }), own = names.length === 1 ? notes(names[0]) : null;
  main.append(make("h2", {}, names.length === 1 ? names[0] : `Compare ${names.join(", ")}`), at,
    own ? actions.box : "", make("div", { class: "bar" }, axisChoice(() => show())),
    cells, charts, table(COLUMNS.map(([, title, , number]) => [title, number]), body), own ?? "");
  const curves = new Map();
  let timer = 0, gone = false;

  const short = (label) => label.slice(names.length === 1 ? label.lastIndexOf("/") + 1 : 0);
  const runs = () => store.list.filter((run) => run.kind === "run" && (wanted.has(run.name)
    || wanted.has(run.name.split("/")[0])));

  function show() {
    for (const [title, column] of Object.entries(TITLES)) {
      draw(holders[title], title, [...curves].map(([label, { rows }]) => {
        const mine = rows.filter((row) => isNumber(row[column]));
        return { label: short(label), x: mine.map((row) => row[look.axis]), y: mine.map((row) => row[column]) };
      }));
    }
    if (!body.contains(document.activeElement)) {
      body.replaceChildren(...runs().map((run) => make("tr", {}, ...COLUMNS.map((column) => cell(run, column)))));
    }
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
      for (const run of runs().slice(0, MOST_CURVES)) {
        const known = curves.get(run.name) ?? { next: followed(run.name, MOST_POINTS), rows: [], more: true };
        if (!known.more && known.state === run.state && run.state !== "running") continue;
        const found = await known.next().catch(() => ({ more: false }));  // the run's row gives the reason
        curves.set(run.name, { ...known, ...found, state: run.state });
      }
      if (own !== null) actions.show((await get(`/api/runs/${address(names[0])}`)).actions);
      const all = runs().length, few = all > curves.size ? `, showing curves of the first ${curves.size}` : "";
      const state = own ? find(names[0])?.state : null;
      at.textContent = curves.size ? `${state ? `${state}, ` : ""}${all} runs${few}` : "No runs of this name yet.";
      if (!gone) { show(); await showGrid(); }
    } catch (error) { at.textContent = error.message; }
    const more = [...curves.values()].some((curve) => curve.more);
    if (!gone) timer = setTimeout(poll, more ? 0 : 2 * POLL_MS);
  }
  poll();
  return { update() { own?.fill(); }, leave() { gone = true; clearTimeout(timer); } };
}
