// Pictures on a canvas: nodes over steps, and the timeline.

import { figure, isNumber, look, make, seconds, share } from "./base.js";
import { draw, places } from "./curves.js";

const KINDS = { compute: "#0072b2", send: "#d55e00", wait: "#b8b8b8", down: "#7a3e9d" };
const WORDS = { compute: "computing", send: "sending", wait: "waiting", down: "down" };
const CROWD = "training loss of all nodes";
const LEFT = 64, BELOW = 20;
const VIEWS = { loss: "training loss", computing: "share of time computing", sending: "share of time sending",
  waiting: "share of time waiting", absent: "absent" };

// Light is low and dark is high, in both themes. null stays empty.
const shade = (part) => `hsl(${205 - 25 * part} ${60 + 20 * part}% ${82 - 52 * part}%)`;

function brushOn(canvas, rows, tall) {
  const width = canvas.parentElement.clientWidth || 600, height = rows * tall + BELOW, scale = devicePixelRatio || 1;
  canvas.width = width * scale; canvas.height = height * scale;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  brush.clearRect(0, 0, width, height);
  brush.fillStyle = getComputedStyle(document.body).color;
  brush.font = "11px system-ui, sans-serif";
  brush.textBaseline = "middle";
  return { brush, width: width - LEFT, height };
}

function names(brush, nodes, tall) {
  const each = Math.max(1, Math.ceil(14 / tall));
  nodes.forEach((node, k) => { if (k % each === 0) brush.fillText(`node ${node}`, 0, (k + 0.5) * tall); });
}

// The section of a run's nodes: a choice of pictures, the picture, and the value under the pointer.
export function nodesPicture() {
  const canvas = make("canvas", { class: "heat", role: "img" }), said = make("p", { class: "soft", role: "status" });
  const choice = make("select", { id: "nodes", onchange(event) { look.nodes = event.target.value; show(); } });
  const { holders, box: band } = places([CROWD]), worst = make("ol", { id: "worst" }), crowd = make("div", { hidden: true }, band,
    make("h3", {}, "Highest newest losses"), worst);
  holders[CROWD].axis = "step";
  const box = make("section", { hidden: true }, make("h2", {}, "Nodes"),
    make("div", { class: "bar" }, make("label", {}, "Show ", choice)), crowd, make("div", {}, canvas), said);
  let found = null, shown = null;

  function matrix(view) {
    if (view === "loss") return { steps: found.steps, rows: found.loss };
    if (view === "absent") {
      return { steps: found.steps, rows: found.loss.map((row) => row.map((_, k) => {
        const there = found.loss.some((other) => other[k] !== null);  // otherwise the column has no losses
        return there ? Number(row[k] === null) : null;
      })) };
    }
    return { steps: found.share_steps, rows: found.shares[view] };
  }

  function show() {
    box.hidden = found === null || !found.nodes.length;
    if (box.hidden) return;
    const views = Object.keys(VIEWS).filter((view) => view === "loss" || view === "absent" || found.shares[view]);
    if (choice.options.length !== views.length) {
      choice.replaceChildren(...views.map((view) => make("option", { value: view }, VIEWS[view])));
    }
    const view = views.includes(look.nodes) ? look.nodes : "loss";
    choice.value = view;
    crowd.hidden = !found.band;
    if (found.band) {
      const { low, median: y, high } = found.band;
      draw(holders[CROWD], CROWD, [{ label: `median of ${found.of} nodes, band from 10 % to 90 %`, x: found.steps, y, low, high }]);
      worst.replaceChildren(...found.worst.map(({ node, loss }) => make("li", {}, `node ${node}: ${figure(loss)}`)));
    }
    const { steps, rows } = matrix(view);
    const values = rows.flat().filter(isNumber), isLoss = view === "loss";
    const level = (value) => (isLoss ? Math.log(Math.max(value, 1e-12)) : value);
    const low = isLoss ? values.reduce((a, b) => Math.min(a, level(b)), Infinity) : 0;
    const high = isLoss ? values.reduce((a, b) => Math.max(a, level(b)), -Infinity) : 1;
    const tall = rows.length > 24 ? 8 : 16, { brush, width } = brushOn(canvas, rows.length, tall);
    names(brush, found.nodes, tall);
    brush.fillText(`step ${steps[0] ?? ""}`, LEFT, rows.length * tall + BELOW / 2);
    const last = `step ${steps.at(-1) ?? ""}`;
    brush.fillText(last, LEFT + width - brush.measureText(last).width, rows.length * tall + BELOW / 2);
    const wide = width / steps.length;
    rows.forEach((row, k) => row.forEach((value, at) => {
      if (value === null) return;
      brush.fillStyle = shade(high > low ? (level(value) - low) / (high - low) : 0.5);
      brush.fillRect(LEFT + at * wide, k * tall, Math.max(wide, 0.5) + 0.3, tall - 1);
    }));
    shown = { steps, rows, wide, tall, isLoss };
    const range = isLoss ? `${figure(Math.exp(low), 3)} to ${figure(Math.exp(high), 3)}` : "0 to 100 %";
    const more = found.of > found.nodes.length ? `. The first ${found.nodes.length} of ${found.of} nodes` : "";
    said.textContent = view === "absent" ? `Dark: absent${more}.` : `Light is low, dark is high: ${range}. Empty: absent${more}.`;
    canvas.setAttribute("aria-label", `${VIEWS[view]} of ${rows.length} nodes over steps, ${range}`);
  }

  canvas.addEventListener("mousemove", (event) => {
    if (shown === null) return;
    const row = Math.floor(event.offsetY / shown.tall), at = Math.floor((event.offsetX - LEFT) / shown.wide);
    const value = shown.rows[row]?.[at];
    if (value === undefined) return;
    const text = value === null ? "absent" : shown.isLoss ? figure(value) : share(value);
    said.textContent = `node ${found.nodes[row]}, step ${shown.steps[at]}: ${text}`;
  });
  return { box, show(now) { found = now ?? found; show(); } };
}

// The timeline's section: when each node computed, sent and waited.
export function timelinePicture() {
  const canvas = make("canvas", { class: "heat", role: "img" }), said = make("p", { class: "soft" });
  const legend = make("p", { class: "legend" });
  const box = make("section", { hidden: true }, make("h2", {}, "Timeline"), legend, make("div", {}, canvas), said);
  for (const [kind, word] of Object.entries(WORDS)) {
    const mark = make("span", { class: "mark" });
    mark.style.background = KINDS[kind];
    legend.append(make("span", {}, mark, word));
  }

  function show(found) {
    box.hidden = !(found?.spans?.length);
    if (box.hidden) return;
    const tall = found.nodes.length > 24 ? 8 : 18, { brush, width } = brushOn(canvas, found.nodes.length, tall);
    names(brush, found.nodes, tall);
    const below = found.nodes.length * tall + BELOW / 2, end = seconds(found.until_s);
    brush.fillText("0 s", LEFT, below);
    brush.fillText(end, LEFT + width - brush.measureText(end).width, below);
    const place = new Map(found.nodes.map((node, k) => [node, k]));
    for (const [node, kind, from, until] of found.spans) {
      brush.fillStyle = KINDS[kind] ?? "#7a3e9d";
      const at = LEFT + width * from / found.until_s;
      brush.fillRect(at, place.get(node) * tall, Math.max(width * (until - from) / found.until_s, 0.5), tall - 2);
    }
    const shares = Object.entries(found.shares).filter(([, part]) => part >= 0.005);
    const text = shares.map(([kind, part]) => `${WORDS[kind] ?? kind} ${share(part)}`).join(", ");
    const cut = found.until_s < found.whole_s ? ` Shown: the first ${seconds(found.until_s)} of ${seconds(found.whole_s)}.` : "";
    said.textContent = `Predicted time. Shares of the whole run: ${text}.${cut}`;
    canvas.setAttribute("aria-label", `activities of ${found.nodes.length} nodes over time: ${text}`);
  }
  return { box, show };
}
