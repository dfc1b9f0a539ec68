// The hosts of runs, and their states. Hosts report over the run's own connections.

import { address, bytes, get, isNumber, make, POLL_MS, rate, seconds, share, stateOf, table } from "./base.js";

const HEADS = [["host", false], ["state", false], ["heartbeat", true], ["device", false], ["CPU", true], ["GPU", true],
  ["memory", true], ["run uses", true], ["received", true], ["sent", true], ["last step", true], ["restarts", true]];

const heads = (hasGpus) => HEADS.filter(([title]) => hasGpus || title !== "GPU");

function row(host, hasGpus) {
  const processes = host.processes ?? [], gpus = host.gpus ?? [];
  const steps = processes.map((one) => one.step), most = Math.max(...steps), least = Math.min(...steps);
  const restarts = host.restarts + Math.max(0, ...processes.map((one) => one.restarts));
  const quiet = Math.max(0, ...processes.map((one) => one.quiet_s));
  const of = (used, total) => (isNumber(used) && isNumber(total) ? `${bytes(used)} of ${bytes(total)}` : "");
  const device = gpus.length ? `${host.device}: ${[...new Set(gpus.map((gpu) => gpu.name))].join(", ")}` : host.device;
  const gpu = gpus.map((one) => `${share(one.use)}, ${of(one.memory_bytes, one.memory_total_bytes)}`).join("; ");
  const number = (text) => make("td", { class: "number" }, text);
  const steady = steps.length ? (least === most ? `${most}` : `${least} to ${most}`) : "";
  const line = make("tr", {}, make("td", {}, host.address), make("td", {}, stateOf(host.state)),
    number(host.quiet_s === null ? "not yet" : `${seconds(Math.round(host.quiet_s))} ago`), make("td", {}, device),
    number(`${share(host.cpu_use)}${isNumber(host.cores) ? ` of ${host.cores}` : ""}`), ...(hasGpus ? [number(gpu)] : []),
    number(of(host.memory_bytes, host.memory_total_bytes)), number(bytes(host.run_memory_bytes)),
    number(rate(host.rx_bps)), number(rate(host.tx_bps)),
    number(quiet > 30 ? `${steady}, silent for ${seconds(quiet)}` : steady), number(restarts));
  heads(hasGpus).forEach(([title], k) => { line.cells[k].dataset.head = title; });  // a card's labels on narrow screens
  return line;
}

// The table of one run's hosts, and the table of their events.
export function hostsTables(found) {
  const events = (found.events ?? []).slice(-50).reverse().map((event) => make("tr", {},
    make("td", {}, new Date(event.at_s * 1000).toLocaleTimeString()), make("td", {}, event.host),
    make("td", {}, event.kind), make("td", { class: "text" }, event.why)));
  const hasGpus = found.hosts.some((host) => host.gpus?.length);
  return [table(heads(hasGpus),
    make("tbody", { class: "hosts" }, ...found.hosts.map((host) => row(host, hasGpus)))),
    make("details", {}, make("summary", {}, "Events"),
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
        const tables = hostsTables(run), details = tables.at(-1);
        details.dataset.run = run.name;
        details.open = open.has(run.name);
        return make("section", {}, make("h3", {}, make("a", { href: `#/run/${address(run.name)}` }, run.name), " ",
          stateOf(run.state), make("span", { class: "soft" },
            run.step === null ? "" : ` step ${run.step} of ${run.total_steps}`)), ...tables);
      }));
    } catch (error) { at.textContent = error.message; }
    if (!gone) timer = setTimeout(poll, 2 * POLL_MS);
  }
  poll();
  return { update() {}, leave() { gone = true; clearTimeout(timer); } };
}
