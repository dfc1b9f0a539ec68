// One run, while it trains and afterwards.

import { actions, address, copied, find, get, isNumber, make, notes, POLL_MS, look, table } from "./base.js";
import { axisChoice, draw, places } from "./curves.js";
import { hostsTables } from "./hosts.js";
import { nodesPicture, timelinePicture } from "./pictures.js";

const CHARTS = {
  loss: ["val_loss", "train_loss"], accuracy: ["val_accuracy"], "bytes sent per node": ["tx_bytes"],
  "consensus distance": ["consensus_distance"], "examples per second": ["examples_per_s"], "learning rate": ["lr"],
};
const MOST_POINTS = 2000, SELDOM = 3;  // pictures are asked for at each third look

export function runPage(main, name) {
  const at = make("p", { class: "soft", role: "status", id: "standing" });
  const acted = make("p", { class: "soft", role: "status" });
  const { holders, box: charts } = places(Object.keys(CHARTS));
  const nodes = nodesPicture(), timeline = timelinePicture(), hosts = make("section", { hidden: true });
  const about = make("section"), events = make("tbody"), own = notes(name), api = `/api/runs/${address(name)}`;
  const link = (text, path, file) => make("a", { href: path, download: file }, text);
  main.append(make("h2", {}, name), at, make("div", { class: "bar" }, axisChoice(() => show()),
    ...actions(name, acted), link("Download records", `${api}/records`, "records.json"),
    link("Download description", api, "run.json")), acted, own,
    charts, hosts, nodes.box, timeline.box, about, make("h2", {}, "Events"),
    table([["time", false], ["what", false], ["step", true], ["told", false]], events));
  let rows = [], last = -1, over = false, timer = 0, looks = 0, shownAbout = "";

  function show() {
    const axis = rows.some((row) => isNumber(row[look.axis])) ? look.axis : "step";
    const x = rows.map((row) => row[axis]);
    for (const [title, names] of Object.entries(CHARTS)) {
      draw(holders[title], title, names.map((label) => ({ label, x, y: rows.map((row) => row[label]) })));
    }
  }

  function describe(run) {
    over = run.state !== "running";
    const step = run.status.step ?? 0, total = run.status.total_steps ?? "?";
    at.textContent = [run.state, run.strategy, `step ${step} of ${total}`].filter(Boolean).join(", ");
    events.replaceChildren(...run.events.slice(-100).reverse().map((event) => {
      const { at_s, kind, step: when, ...told } = event;
      return make("tr", {}, make("td", {}, new Date(at_s * 1000).toLocaleTimeString()), make("td", {}, kind),
        make("td", { class: "number" }, when), make("td", { class: "text" }, JSON.stringify(told)));
    }));
    const text = JSON.stringify([run.description, run.command, run.snippet]);
    if (text === shownAbout) return;  // what someone may be selecting from stays
    shownAbout = text;
    const facts = make("dl");
    for (const [key, value] of Object.entries(run.description)) {
      if (value === null || key === "model") continue;
      facts.append(make("dt", {}, key), make("dd", {}, typeof value === "object" ? JSON.stringify(value) : value));
    }
    about.replaceChildren(make("h2", {}, "What it is"), facts,
      run.command || run.snippet ? make("h2", {}, "Again") : "", run.command ? copied("Command", run.command) : "", run.snippet ? copied("Python", run.snippet) : "");
  }

  async function pictures() {
    nodes.show(await get(`${api}/nodes`));
    timeline.show(await get(`${api}/timeline`));
    const found = await get(`${api}/hosts`);
    hosts.hidden = !found.hosts;
    if (found.hosts) {
      const open = hosts.querySelector("details")?.open ?? false;
      hosts.replaceChildren(make("h2", {}, "Hosts"), ...hostsTables(found));
      hosts.querySelector("details").open = open;
    }
  }

  async function poll() {
    try {
      const run = await get(api);
      const found = await get(`${api}/records?node=none&after=${last}&most=${MOST_POINTS}`);
      if (found.last < last) { rows = []; last = -1; }  // it goes on from an earlier step
      else { rows.push(...found.records); last = found.last; }
      while (rows.length > 2 * MOST_POINTS) rows = rows.filter((row, k) => k % 2 || isNumber(row.val_loss) && k % 4);
      describe(run);
      show();
      if (over || looks % SELDOM === 0) await pictures();
      looks += 1;
    } catch (error) { at.textContent = error.message; }
    timer = over ? 0 : setTimeout(poll, POLL_MS);
  }
  poll();
  return {
    update() { own.fill(); if (over && !timer && find(name)?.state === "running") poll(); },
    leave() { clearTimeout(timer); over = true; },
  };
}
