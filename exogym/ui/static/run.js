// One run, during and after training.

import { actions, address, copied, find, followed, get, isNumber, make, notes, PART_BYTES, POLL_MS, look, table } from "./base.js";
import { axisChoice, draw, places } from "./curves.js";
import { hostsTables } from "./hosts.js";
import { nodesPicture, timelinePicture } from "./pictures.js";

const CHARTS = {
  loss: ["val_loss", "train_loss"], accuracy: ["val_accuracy"], "bytes sent per node": ["tx_bytes"],
  "consensus distance": ["consensus_distance"], "examples per second": ["examples_per_s"], "learning rate": ["lr"],
};
const MOST_POINTS = 2000, SELDOM = 3;  // pictures load at every third poll
const BEFORE_DRAWING_MS = 500;  // time for reading a long run between two drawings

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
    table([["time", false], ["event", false], ["step", true], ["details", false]], events));
  const next = followed(name, MOST_POINTS);
  let rows = [], over = false, gone = false, behind = false, timer = 0, looks = 0, shownAbout = "";

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
    if (text === shownAbout) return;  // keep the text that somebody may be selecting
    shownAbout = text;
    const facts = make("dl");
    for (const [key, value] of Object.entries(run.description)) {
      if (value === null || key === "model") continue;
      facts.append(make("dt", {}, key), make("dd", {}, typeof value === "object" ? JSON.stringify(value) : value));
    }
    about.replaceChildren(make("h2", {}, "Options"), facts,
      run.command || run.snippet ? make("h2", {}, "Repeat this run") : "", run.command ? copied("Command", run.command) : "", run.snippet ? copied("Python", run.snippet) : "");
  }

  // Draw the pictures, and return whether their files have more to read.
  async function pictures() {
    const told = await get(`${api}/nodes?most_bytes=${PART_BYTES}`);
    nodes.show(told);
    timeline.show(await get(`${api}/timeline`));
    const found = await get(`${api}/hosts`);
    hosts.hidden = !found.hosts;
    if (found.hosts) {
      const open = hosts.querySelector("details")?.open ?? false;
      hosts.replaceChildren(make("h2", {}, "Hosts"), ...hostsTables(found));
      hosts.querySelector("details").open = open;
    }
    return told.more;
  }

  async function poll() {
    let more = false;
    try {
      const run = await get(api), until = performance.now() + BEFORE_DRAWING_MS;
      describe(run);
      if (run.reason) throw new Error(`${run.state}: ${run.reason}`);
      do { ({ rows, more } = await next()); } while (more && !gone && performance.now() < until);
      show();
      if (over || behind || looks % SELDOM === 0) behind = await pictures();
      looks += 1;
    } catch (error) { at.textContent = error.message; more = behind = false; }
    if (gone) return;
    timer = over && !more && !behind ? 0 : setTimeout(poll, more || behind ? 0 : POLL_MS);
  }
  poll();
  return {
    update() { own.fill(); if (over && !timer && !gone && find(name)?.state === "running") poll(); },
    leave() { clearTimeout(timer); gone = true; },
  };
}
