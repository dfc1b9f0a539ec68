// Pictures on a canvas: nodes over steps, and the timeline.

import { figure, get, isNumber, look, make, seconds, share } from "./base.js";
import { draw, markOf, places } from "./curves.js";

const ABSENT = "#7a3e9d";
const KINDS = { compute: ["#0072b2", "computing"], send: ["#d55e00", "sending"], wait: ["#b8b8b8", "waiting"], absent: [ABSENT, "absent"] };
const CROWD = "training loss";
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
  const box = make("section", { hidden: true }, make("h2", {}, "Nodes"),
    make("div", { class: "bar" }, make("label", {}, "Show ", choice)), crowd, make("div", {}, canvas), said);
  let found = null, shown = null;

  // The rows of a view. away: whether a node was absent; null where no node has a loss.
  function matrix(view) {
    if (view !== "loss" && view !== "absent") return { steps: found.share_steps, rows: found.shares[view], away: [] };
    const known = found.steps.map((_, k) => found.loss.some((row) => row[k] !== null));
    const away = found.loss.map((row) => row.map((value, k) => (known[k] ? value === null : null)));
    return { steps: found.steps, away, rows: view === "loss" ? found.loss : away.map((row) => row.map((gone) => (gone === null ? null : 0))) };
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
      draw(holders[CROWD], `${CROWD}: median of ${found.of} nodes, band from 10 % to 90 %`, [{ label: "median", x: found.steps, y, low, high }], { ...look, axis: "step" });
      worst.replaceChildren(...found.worst.map(({ node, loss }) => make("li", {}, `node ${node}: ${figure(loss)}`)));
    }
    const { steps, rows, away } = matrix(view);
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
      const gone = away[k]?.[at];
      if (value === null && !gone) return;
      brush.fillStyle = gone ? ABSENT : shade(view === "absent" ? 0 : high > low ? (level(value) - low) / (high - low) : 0.5);
      brush.fillRect(LEFT + at * wide, k * tall, Math.max(wide, 0.5) + 0.3, tall - 1);
    }));
    shown = { steps, rows, away, wide, tall, isLoss };
    const range = isLoss ? `${figure(Math.exp(low), 3)} to ${figure(Math.exp(high), 3)}` : "0 to 100 %";
    const more = found.of > found.nodes.length ? `. The first ${found.nodes.length} of ${found.of} nodes` : "";
    const anyAway = away.flat().some(Boolean), own = isLoss || view === "absent";
    said.textContent = `${view === "absent" ? "" : `Light is low, dark is high: ${range}. `}${own && !anyAway ? "No node was absent" : own ? "Purple: absent" : "Empty: no value"}${more}.`;
    canvas.setAttribute("aria-label", `${VIEWS[view]} of ${rows.length} nodes over steps, ${range}`);
  }

  canvas.addEventListener("mousemove", (event) => {
    if (shown === null) return;
    const row = Math.floor(event.offsetY / shown.tall), at = Math.floor((event.offsetX - LEFT) / shown.wide);
    const value = shown.rows[row]?.[at];
    if (value === undefined) return;
    const gone = shown.away[row]?.[at], number = choice.value === "absent" ? "present" : shown.isLoss ? figure(value) : share(value);
    const text = gone ? "absent" : value === null ? "no value" : number;
    said.textContent = `node ${found.nodes[row]}, step ${shown.steps[at]}: ${text}`;
  });
  return { box, show(now) { found = now ?? found; show(); } };
}

// The timeline's section: when each node computed, sent and waited. Drag, or use the buttons, to zoom; new data keep the zoom.
export function timelinePicture(api) {
  const canvas = make("canvas", { class: "heat", role: "img", id: "timeline" }), said = make("p", { class: "soft" });
  const legend = make("p", { class: "legend" }), tools = make("div", { class: "bar tools" });
  const held = make("div", { class: "plot" }, canvas);
  const box = make("section", { hidden: true }, make("h2", {}, "Timeline"), legend, held, tools, said);
  let found = null, window_ = null, from = null, width = 1;  // window_: seconds from and to; null: all
  legend.append(...Object.values(KINDS).map(([color, word]) => make("span", {}, markOf({ color, dash: [] }), word)));

  // Show these seconds; at the ends the window stays as long as it is.
  function zoom(first, last) {
    const long = Math.min(Math.max(last - first, 1e-9), found.whole_s), begin = Math.max(0, Math.min(first, found.whole_s - long));
    window_ = long >= found.whole_s ? null : [begin, begin + long];
    load();
  }
  const scale = (factor) => { const { from_s: a, until_s: b } = found, half = (b - a) * factor / 2; zoom((a + b) / 2 - half, (a + b) / 2 + half); };
  const move = (part) => { const { from_s: a, until_s: b } = found, by = (b - a) * part; zoom(a + by, b + by); };
  const button = (text, onclick) => make("button", { type: "button", onclick }, text);
  const whole = button("Show all", () => { window_ = null; load(); });
  tools.append(button("Zoom in", () => scale(0.5)), button("Zoom out", () => scale(2)), button("Earlier", () => move(-0.5)),
    button("Later", () => move(0.5)), whole);

  const mark = make("div", { class: "chosen-part", hidden: true });
  held.append(mark);
  const place = (event) => Math.min(Math.max(event.offsetX - LEFT, 0), width);
  const timeAt = (at) => found.from_s + (found.until_s - found.from_s) * at / width;
  canvas.addEventListener("pointerdown", (event) => { from = place(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = place(event);
    mark.hidden = false;
    mark.style.left = `${LEFT + Math.min(from, to)}px`; mark.style.width = `${Math.abs(to - from)}px`;
    mark.style.height = `${canvas.clientHeight - BELOW}px`;
  });
  const end = (event) => {
    if (from === null) return;
    const to = place(event), [a, b] = [Math.min(from, to), Math.max(from, to)];
    from = null; mark.hidden = true;
    if (event.type === "pointerup" && b - a > 4) zoom(timeAt(a), timeAt(b));
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("dblclick", () => { window_ = null; load(); });

  function show() {
    box.hidden = !(found?.spans && found.nodes.length);
    if (box.hidden) return;
    const tall = found.nodes.length > 24 ? 8 : 18, painted = brushOn(canvas, found.nodes.length, tall), { brush } = painted;
    width = painted.width;
    names(brush, found.nodes, tall);
    const below = found.nodes.length * tall + BELOW / 2, last = seconds(found.until_s), long = found.until_s - found.from_s;
    brush.fillText(seconds(found.from_s), LEFT, below);
    brush.fillText(last, LEFT + width - brush.measureText(last).width, below);
    const row = new Map(found.nodes.map((node, k) => [node, k]));
    for (const [node, kind, first, until] of found.spans) {
      brush.fillStyle = KINDS[kind]?.[0] ?? "#b8b8b8";
      brush.fillRect(LEFT + width * (first - found.from_s) / long, row.get(node) * tall, Math.max(width * (until - first) / long, 0.5), tall - 2);
    }
    const shares = Object.entries(found.shares).filter(([, part]) => part >= 0.005);
    const text = shares.map(([kind, part]) => `${KINDS[kind]?.[1] ?? kind} ${share(part)}`).join(", ");
    const cut = long < found.whole_s ? ` Shown: ${seconds(found.from_s)} to ${last} of ${seconds(found.whole_s)}.` : " Drag over the picture to zoom.";
    const away = found.spans.some(([, kind]) => kind === "absent") ? " Waiting includes absent." : "";
    said.textContent = `Predicted time. Shares of the whole run: ${text}.${away}${cut}`;
    whole.hidden = window_ === null;
    canvas.setAttribute("aria-label", `activities of ${found.nodes.length} nodes from ${seconds(found.from_s)} to ${last}: ${text}`);
  }
  async function load() {
    const asked = window_, path = `${api}/timeline${asked ? `?from_s=${asked[0]}&to_s=${asked[1]}` : ""}`, now = await get(path);
    if (asked === window_) { found = now; show(); }
  }
  return { box, load };
}
