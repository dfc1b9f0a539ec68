// The hosts of runs, and their states. Hosts report over the run's own connections.

import { address, bytes, clock, get, isNumber, make, POLL_MS, rate, seconds, share, spark, stateOf, table } from "./base.js";

const BEHIND_S = 6, MEASURED_S = 4;  // three reports of a host; seconds of looking, after which a run's pace is known
const WELL = new Set(["starting", "running", "done", "stopped"]);
const MOST_SEEN = 60, seen = new Map();  // points of a small curve; run and host to the rates that this page saw
const firsts = new Map();  // run to when and at which step this page first saw it

const stepsOf = (host) => (host.processes ?? []).map((one) => one.step);
const newest = (hosts) => Math.max(0, ...hosts.flatMap(stepsOf));

// Steps per second since this page first saw the run; null if not known yet.
function paceOf(name, step) {
  const now = performance.now() / 1000, first = firsts.get(name);
  if (!first || step < first.step) firsts.set(name, { now, step });
  return first && step > first.step && now - first.now > MEASURED_S ? (step - first.step) / (now - first.now) : null;
}

// A sentence on a run's hosts, and whether one of them needs attention.
function said(hosts, pace) {
  const of = (many) => `${many.length > 1 ? `${many.length} hosts (${many.map((host) => host.address).join(", ")})` : many[0].address}`;
  const ill = hosts.filter((host) => !WELL.has(host.state)), last = newest(hosts), behind = (host) => last - Math.min(last, ...stepsOf(host));
  if (ill.length) return [`${of(ill)}: ${[...new Set(ill.map((host) => (host.state === "silent" ? `silent for ${seconds(Math.round(host.quiet_s))}` : host.state)))].join(", ")}.`, true];
  const slow = hosts.filter((host) => pace && behind(host) / pace - (host.quiet_s ?? 0) > BEHIND_S);
  if (slow.length) return [`${of(slow)}: ${Math.max(...slow.map(behind))} steps behind.`, true];
  const apart = Math.max(0, ...hosts.map(behind)), begin = hosts.filter((host) => host.state === "starting");
  return [begin.length ? `${of(begin)}: starting.` : `${hosts.length > 1 ? `All ${hosts.length} hosts report` : "The host reports"}${apart ? `, at most ${apart} steps apart` : ""}.`, false];
}

function card(name, host) {
  const key = `${name} ${host.address}`, rates = seen.get(key) ?? seen.set(key, []).get(key);
  if (isNumber(host.tx_bps) && host.state === "running") rates.push(host.tx_bps);
  if (rates.length > MOST_SEEN) rates.shift();
  const processes = host.processes ?? [], gpus = host.gpus ?? [], steps = stepsOf(host), most = Math.max(...steps), least = Math.min(...steps);
  const quiet = Math.max(0, ...processes.map((one) => one.quiet_s)), steady = !steps.length ? "" : least === most ? `${most}` : `${least} to ${most}`;
  const of = (used, total) => (isNumber(used) && isNumber(total) ? `${bytes(used)} of ${bytes(total)}` : "");
  const lines = {
    heartbeat: host.quiet_s === null ? "not yet" : `${seconds(Math.round(host.quiet_s))} ago`,
    "last step": quiet > 30 && host.state === "running" ? `${steady}, silent for ${seconds(quiet)}` : steady,
    device: gpus.length ? `${host.device}: ${[...new Set(gpus.map((gpu) => gpu.name))].join(", ")}` : host.device,
    CPU: `${share(host.cpu_use)}${isNumber(host.cores) ? ` of ${host.cores}` : ""}`,
    GPU: gpus.map((one) => `${share(one.use)}, ${of(one.memory_bytes, one.memory_total_bytes)}`).join("; "),
    memory: of(host.memory_bytes, host.memory_total_bytes), "run uses": bytes(host.run_memory_bytes),
    received: rate(host.rx_bps), sent: rates.length > 2 ? make("span", {}, spark(rates, 0), rate(host.tx_bps)) : rate(host.tx_bps),
    restarts: host.restarts + Math.max(0, ...processes.map((one) => one.restarts)),
  };
  return make("dl", { class: WELL.has(host.state) ? "host" : "host stale" }, make("dt", {}, host.address), make("dd", {}, stateOf(host.state)),
    ...Object.entries(lines).filter(([, text]) => text !== "").flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]));
}

// A run's hosts: a sentence, the time left, a card per host, and their events.
export function hostsOf(name, found, total) {
  const last = newest(found.hosts), pace = paceOf(name, last), [text, isIll] = said(found.hosts, pace);
  const isLive = found.hosts.some((host) => host.state === "running"), rest = (total - last) / pace;
  const left = isLive && pace && isNumber(total) ? `, about ${seconds(rest)} left, done at about ${clock(Date.now() + 1000 * rest)}` : "";
  const events = (found.events ?? []).slice(-50).reverse().map((event) => make("tr", {},
    make("td", {}, new Date(event.at_s * 1000).toLocaleTimeString()), make("td", {}, event.host),
    make("td", {}, event.kind), make("td", { class: "text" }, event.why)));
  return [make("p", { class: isIll ? "health warn" : "health" }, text),
    ...(isNumber(total) ? [make("p", { class: "soft" }, `Step ${last} of ${total}${left}`), make("progress", { max: total, value: last, "aria-label": "steps" })] : []),
    make("div", { class: "hosts" }, ...found.hosts.map((host) => card(name, host))), make("details", {}, make("summary", {}, "Events"),
      table([["time", false], ["host", false], ["event", false], ["reason", false]], make("tbody", {}, ...events)))];
}

export function hostsPage(main) {
  const at = make("p", { class: "soft", role: "status" }), box = make("div");
  main.append(make("h2", {}, "Hosts"), at, box);
  let timer = 0, gone = false;
  async function poll() {
    try {
      const found = await get("/api/hosts");
      if (gone) return;
      at.textContent = found.length ? "" : "No multi-host runs yet. Runs of NetworkTrainer and exogym distributed-train appear here.";
      const open = new Set([...box.querySelectorAll("details[open]")].map((one) => one.dataset.run));
      box.replaceChildren(...found.map((run) => {
        const parts = hostsOf(run.name, run, run.total_steps), details = parts.at(-1);
        details.dataset.run = run.name;
        details.open = open.has(run.name);
        return make("section", {}, make("h3", {}, make("a", { href: `#/run/${address(run.name)}` }, run.name), " ", stateOf(run.state, run)), ...parts);
      }));
    } catch (error) { at.textContent = error.message; }
    if (!gone) timer = setTimeout(poll, 2 * POLL_MS);
  }
  poll();
  return { update() {}, leave() { gone = true; clearTimeout(timer); } };
}
