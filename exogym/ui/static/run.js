// One run, during and after training.

import {
  actionsOf, address, againLink, bytes, clock, copied, figure, find, followed, get, heading, isNumber, look, make, noRun, notes, optionsOf, PART_BYTES, POLL_MS, seconds,
  skeleton, stateOf, strategiesOf, table,
} from "./base.js";
import { axisChoice, draw, places } from "./curves.js";
import { hostsOf } from "./hosts.js";
import { absences, nodesPicture, timelinePicture } from "./pictures.js";

const CHARTS = {
  loss: ["val_loss", "train_loss"], accuracy: ["val_accuracy"], "bytes sent per node": ["tx_bytes"],
  "consensus distance": ["consensus_distance"], "examples per second": ["examples_per_s"], "learning rate": ["lr"],
};
const [LOSS, ...OTHERS] = Object.keys(CHARTS), TALL = 320;
const MOST_POINTS = 2000, SELDOM = 3;  // pictures load at every third poll
const BEFORE_DRAWING_MS = 500;  // time for reading a long run between two drawings

// One row for each option: first those that differ from the defaults, the others folded.
function optionTables({ description, usual = [] }) {
  const all = optionsOf(description).filter(([key]) => key !== "model");
  const rows = (wanted) => make("tbody", {}, ...all.filter(([key]) => wanted === usual.includes(key)).map(([, name, text]) => make("tr", {},
    make("th", { scope: "row" }, name), make("td", { class: "text" }, text))));
  const heads = [["option", false], ["value", false]];
  return [table(heads, rows(false)), make("details", {}, make("summary", {}, "Options with their defaults"), table(heads, rows(true)))];
}

export function runPage(main, name) {
  const at = make("p", { class: "soft", role: "status", id: "standing" });
  const actions = actionsOf(name), again = againLink(name), trouble = make("section", { class: "trouble", role: "alert", hidden: true });
  const bones = skeleton(), tiles = make("dl", { class: "tiles" }), folded = make("summary", {}, "Events"), health = make("p", { id: "health", class: "health" });
  const head = heading(name), bar = make("progress", { id: "progress", "aria-label": "steps", hidden: true }), { holders: large, box: first } = places([LOSS]), { holders: small, box: charts } = places(OTHERS), holders = { ...large, ...small };
  first.classList.add("one"); large[LOSS].tall = TALL;
  const nodes = nodesPicture(), timeline = timelinePicture(`/api/runs/${address(name)}`), hosts = make("section", { hidden: true });
  const about = make("section"), events = make("tbody"), own = notes(name), api = `/api/runs/${address(name)}`;
  const link = (text, path, file) => make("a", { href: path, download: file }, text);
  const [axes, choices] = axisChoice("axis", { logx: "Log x", logy: "Log y" }, () => show(), again.link);
  const rest = make("div", { hidden: true }, axes, choices,
    first, charts, hosts, nodes.box, timeline.box, own, about, make("div", { class: "bar" },
      link("Download records", `${api}/records`, "records.json"), link("Download description", api, "run.json")), make("details", { id: "events" }, folded,
      table([["time", false], ["event", false], ["step", true], ["details", false]], events)));
  main.append(head, trouble, at, bar, bones, tiles, health, actions.box, rest);
  const next = followed(name, MOST_POINTS);
  let rows = [], away = [], best = null, run = null, told = "", seen = {}, over = false, gone = false, behind = false, timer = 0, looks = 0, shownAbout = "";

  function show() {
    const axis = rows.some((row) => isNumber(row[look.axis])) ? look.axis : "step";
    for (const tab of axes.children) tab.hidden = !rows.some((row) => isNumber(row[tab.value]));
    const x = rows.map((row) => row[axis]), placed = (step) => (rows.find((row) => row.step >= step) ?? rows.at(-1))?.[axis];
    large[LOSS].spans = away.map(({ from, to, ...one }) => ({ ...one, from: placed(from), to: placed(to) }));
    for (const [title, names] of Object.entries(CHARTS)) {
      draw(holders[title], title, names.map((label) => ({ label, x, y: rows.map((row) => row[label]) })), { ...look, axis });
    }
  }

  // Seconds until the last step, at the pace of the newer half of the steps so far.
  function left() {
    const timed = rows.filter((row) => row.step > 0 && isNumber(row.wall_s)), last = timed.at(-1);
    const first = timed.find((row) => row.step >= last.step / 2), { step = 0, total_steps: total } = run.status;
    if (!isNumber(total) || timed.length < 2 || first.step === last.step) return null;
    return Math.max(0, total - Math.max(step, last.step)) * (last.wall_s - first.wall_s) / (last.step - first.step);
  }

  function summary() {
    if (run === null || run.reason) return;
    const { step: said = 0, total_steps: total, heartbeat_s: heard } = run.status, rest = over ? null : left(), step = Math.max(said, rows.at(-1)?.step ?? 0);
    const newest = (column) => rows.findLast((row) => isNumber(row[column])), loss = newest("val_loss");
    const sent = newest("tx_bytes"), timed = newest("wall_s");
    const end = rest === null ? "" : `done at about ${clock(Date.now() + 1000 * rest)}`;
    const ago = isNumber(heard) ? `last report ${seconds(Math.max(0, Math.round(Date.now() / 1000 - heard)))} ago` : "";
    const now = find(name)?.strategies?.length ? strategiesOf(find(name)) : run.strategy ?? "";
    at.replaceChildren(now);
    const tile = (title, value, below) => make("div", {}, make("dt", {}, title), make("dd", {}, value),
      make("dd", { class: "soft" }, below));
    bar.hidden = !isNumber(total) || run.state === "done"; bar.max = total ?? 1; bar.value = step;
    tiles.replaceChildren(
      tile("State", stateOf(run.state, seen), over ? (isNumber(heard) ? `ended ${clock(1000 * heard)}` : "") : ago),
      tile("Step", `${step} of ${total ?? "?"}`, total ? `${Math.floor(100 * step / total)} %` : ""),
      tile("Validation loss", figure(loss?.val_loss) || "none yet", loss ? `at step ${loss.step}` : ""),
      tile("Best loss", figure(best?.val_loss) || "none yet", best ? `at step ${best.step}` : ""),
      tile("Sent per node", bytes(sent?.tx_bytes) || "none yet", sent ? `until step ${sent.step}` : ""),
      over ? tile("Time trained", seconds(timed?.wall_s) || "unknown", "")
        : tile("Time left", rest === null ? "not known yet" : seconds(rest), [timed ? `${seconds(timed.wall_s)} so far` : "", end].filter(Boolean).join(", ")));
  }

  // What went wrong, with the last lines that the run said.
  function showTrouble() {
    const error = run.state === "failed" ? run.events.findLast((event) => event.kind === "error") : null;
    const { step = 0, total_steps: total, trouble: unwritten } = run.status ?? {};
    let title = "", lines = "";
    if (run.reason) title = `${run.state}: ${run.reason}`;
    else if (run.state === "failed") {
      title = error ? `Failed at step ${error.step}: ${error.error}: ${error.why}` : `Failed at step ${step}. The run did not say why.`;
      lines = error?.trace ?? run.output ?? "";
    } else if (run.state === "lost") {
      title = `Lost at step ${step} of ${total ?? "?"}: the run's process ended without a word (killed, out of memory, or the machine went off).`;
      lines = run.output ?? "";
    } else if (unwritten) title = `The run can no longer write its folder: ${unwritten}`;
    if (title + lines === told) return;
    told = title + lines;
    trouble.hidden = !title;
    trouble.replaceChildren(make("strong", {}, title), lines ? make("pre", { tabindex: "0" }, String(lines).split("\n").slice(-12).join("\n")) : "");
  }

  function describe(found) {
    run = found;
    bones.remove(); head.fill(run); own.fill(run); rest.hidden = false;
    over = run.state !== "running";
    actions.show(run.actions);
    again.show(run);
    showTrouble();
    summary();
    folded.textContent = `Events (${run.events.length})`;
    events.replaceChildren(...run.events.slice(-100).reverse().map((event) => {
      const { at_s, kind, step: when, ...told } = event;
      return make("tr", {}, make("td", {}, new Date(at_s * 1000).toLocaleTimeString()), make("td", {}, kind),
        make("td", { class: "number" }, when), make("td", { class: "text" }, JSON.stringify(told)));
    }));
    const text = JSON.stringify([run.description, run.command, run.snippet]);
    if (text === shownAbout) return;  // keep the text that somebody may be selecting
    shownAbout = text;
    about.replaceChildren(make("h2", {}, "Options"), ...optionTables(run),
      run.command || run.snippet ? make("h2", {}, "Repeat this run") : "", run.command ? copied("Command", run.command) : "", run.snippet ? copied("Python", run.snippet) : "");
  }

  // The sentences on nodes, with the time since an absence began.
  const healthOf = (text) => (over ? text.replace("has been absent since", "was absent from") : text.replace(/absent since step (\d+)/, (all, step) => {
    const ago = rows.at(-1)?.wall_s - rows.find((row) => row.step >= step)?.wall_s + Date.now() / 1000 - run.status.heartbeat_s;
    return isNumber(ago) ? `${all} (${seconds(Math.max(0, Math.round(ago)))} ago)` : all;
  }));

  // Draw the pictures, and return whether their files have more to read.
  async function pictures() {
    const told = await get(`${api}/nodes?most_bytes=${PART_BYTES}`);
    nodes.show(told); away = absences(told); show();
    seen = told; health.textContent = healthOf(told.health); health.classList.toggle("warn", Boolean(told.health) && !told.health.startsWith("All "));
    await timeline.load();
    const found = await get(`${api}/hosts`);
    hosts.hidden = !found.hosts;
    if (found.hosts) {
      const open = hosts.querySelector("details")?.open ?? false;
      hosts.replaceChildren(make("h2", {}, "Hosts"), ...hostsOf(name, found, run.status.total_steps));
      hosts.querySelector("details").open = open;
    }
    return told.more;
  }

  async function poll() {
    let more = false;
    try {
      const found = await get(api), until = performance.now() + BEFORE_DRAWING_MS;
      if (gone) return;
      if (!found.reason && found.kind !== "run") {
        if (found.kind === undefined) throw noRun(name);
        location.replace(`#/compare/${encodeURIComponent(name)}`);
        return;
      }
      describe(found);
      if (run.reason) throw new Error(`${run.state}: ${run.reason}`);
      do { ({ rows, more, best } = await next()); } while (more && !gone && performance.now() < until);
      show();
      summary();
      if (over || behind || looks % SELDOM === 0) behind = await pictures();
      looks += 1;
    } catch (error) { bones.remove(); at.textContent = error.message; more = behind = false; }
    if (gone) return;
    timer = over && !more && !behind ? 0 : setTimeout(poll, more || behind ? 0 : POLL_MS);
  }
  poll();
  return {
    update() { if (over && !timer && !gone && find(name)?.state === "running") poll(); },
    leave() { clearTimeout(timer); gone = true; },
  };
}
