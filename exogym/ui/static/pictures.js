// Pictures on a canvas: nodes over steps, and the timeline.

import { figure, get, isNumber, look, make, scaleBar, seconds, share } from "./base.js";
import { beside, draw, markOf, places } from "./curves.js";

const ABSENT = "#7a3e9d";
const KINDS = { compute: ["#0072b2", "computing"], send: ["#d55e00", "sending"], wait: ["#b8b8b8", "waiting"], absent: [ABSENT, "absent"] };
const CROWD = "training loss", EDGE = 0.02, MOST_TIMES = 4;  // EDGE: the share of losses at each end that take the end's color; MOST_TIMES: the median, and its part, at the ends of a relative loss
const LEFT = 64, BELOW = 24, APART = 90, RIGHT = 150, NARROW = 600;  // pixels of the names, of the marks, between two marks, of the shares and of a narrow picture
const VIEWS = { relative: "training loss relative to the median node", loss: "training loss", computing: "share of time computing", sending: "share of time sending", waiting: "share of time waiting" };

// Light is low and dark is high, in both themes. null stays empty.
const shade = (part) => `hsl(${205 - 25 * part} ${60 + 20 * part}% ${82 - 52 * part}%)`;

function brushOn(canvas, rows, tall, right = 0) {
  const width = canvas.parentElement.clientWidth || 600, height = rows * tall + BELOW, scale = devicePixelRatio || 1;
  canvas.width = width * scale; canvas.height = height * scale;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  brush.clearRect(0, 0, width, height);
  brush.fillStyle = getComputedStyle(document.body).color;
  brush.font = "12px system-ui, sans-serif";
  brush.textBaseline = "middle";
  return { brush, width: width - LEFT - (width > NARROW ? right : 0), height, isWide: width > NARROW };
}

const tallOf = (nodes) => (nodes.length > 24 ? 8 : nodes.length > 8 ? 16 : 28);

// Marks with round numbers below a picture. `placeOf`: a number's distance from the left.
function marks({ brush, width }, below, from, to, placeOf, form, least = 1e-9) {
  const rough = Math.max((to - from) * APART / width, least), power = 10 ** Math.floor(Math.log10(rough));
  const each = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
  for (let k = Math.ceil(from / each); k * each <= to; k += 1) {
    const x = LEFT + placeOf(k * each), text = form(k * each), wide = brush.measureText(text).width;
    brush.fillRect(x, below, 1, 5);
    brush.fillText(text, Math.max(LEFT, Math.min(x - wide / 2, LEFT + width - wide)), below + 15);
  }
}

// Beside the pointer a box with what `textAt` says of the place, and a line through the picture.
function reading(canvas, textAt) {
  const tip = make("div", { class: "tip", hidden: true }), line = make("div", { class: "hair", hidden: true });
  canvas.after(line, tip);
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    tip.textContent = (offsetX >= LEFT && textAt(offsetX - LEFT, offsetY)) || "";
    tip.hidden = line.hidden = !tip.textContent;
    line.style.left = `${offsetX}px`; tip.style.top = `${offsetY + 16}px`;
    beside(tip, offsetX, canvas.clientWidth);
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = line.hidden = true; });
}

const isAway = (away, n, k) => away[n].some(([first, end]) => first <= k && k < end);

// The intervals of steps in which nodes were absent, as strips of a chart over steps.
export function absences({ steps, away, nodes }) {
  const gone = steps.map((_, k) => nodes.filter((_, n) => isAway(away, n, k)).join(", "));
  const begins = gone.flatMap((text, k) => (text !== gone[k - 1] ? [k] : []));
  return begins.map((k, n) => ({ from: steps[k], to: steps[begins[n + 1]] ?? Infinity, color: ABSENT, label: `node ${gone[k]} absent`, gone: gone[k] })).filter((one) => one.gone);
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
  const held = make("div", { class: "plot" }, canvas), box = make("section", { hidden: true }, make("h2", {}, "Nodes"),
    make("div", { class: "bar" }, make("label", {}, "Show ", choice)), crowd, held, said);
  reading(canvas, readAt);
  let found = null, shown = null;

  // The rows of a view. away: whether a node was absent.
  function matrix(view) {
    if (found.shares[view]) return { steps: found.share_steps, rows: found.shares[view], away: [] };
    const usual = found.steps.map((_, k) => { const all = found.loss.map((row) => row[k]).filter(isNumber).sort((a, b) => a - b); return (all[(all.length - 1) >> 1] + all[all.length >> 1]) / 2; });
    const rows = view === "loss" ? found.loss : found.loss.map((row) => row.map((value, k) => (isNumber(value) && usual[k] > 0 ? value / usual[k] : null)));
    return { steps: found.steps, rows, away: found.loss.map((row, n) => row.map((_, k) => isAway(found.away, n, k))) };
  }

  function show() {
    box.hidden = found === null || !found.nodes.length;
    if (box.hidden) return;
    const views = Object.keys(VIEWS).filter((view) => (view === "relative" ? found.nodes.length > 1 : view === "loss" || found.shares[view]));
    if (choice.options.length !== views.length) {
      choice.replaceChildren(...views.map((view) => make("option", { value: view }, VIEWS[view])));
    }
    const view = views.includes(look.nodes) ? look.nodes : views[0];
    choice.value = view;
    crowd.hidden = !found.band;
    if (found.band) {
      const { low, median: y, high } = found.band;
      draw(holders[CROWD], `${CROWD}: median of ${found.of} nodes, band from 10 % to 90 %`, [{ label: "median", x: found.steps, y, low, high }], { ...look, axis: "step" });
      worst.replaceChildren(...found.worst.map(({ node, loss }) => make("li", {}, `node ${node}: ${figure(loss)}`)));
    }
    const { steps, rows, away } = matrix(view);
    const values = rows.flat().filter(isNumber), isLoss = !found.shares[view], ratio = view === "relative";
    const level = (value) => (isLoss ? Math.log(Math.max(value, 1e-12)) : value);
    const sorted = isLoss ? values.map(level).sort((a, b) => a - b) : [0, 1], edge = isLoss ? Math.floor(EDGE * sorted.length) : 0;
    const low = ratio ? -Math.log(MOST_TIMES) : sorted[edge], high = ratio ? -low : sorted.at(-1 - edge), part = (value) => Math.min(Math.max((level(value) - low) / (high - low), 0), 1);
    const tall = tallOf(rows), painted = brushOn(canvas, rows.length, tall), { brush, width } = painted, wide = width / steps.length;
    names(brush, found.nodes, tall);
    if (steps.length) marks(painted, rows.length * tall, steps[0], steps.at(-1), (step) => steps.findIndex((one) => one >= step) * wide, (step) => `step ${step}`, 1);
    rows.forEach((row, k) => row.forEach((value, at) => {
      const gone = away[k]?.[at];
      if (value === null && !gone) return;
      brush.fillStyle = gone ? ABSENT : shade(high > low ? part(value) : 0.5);
      brush.fillRect(LEFT + at * wide, k * tall, Math.max(wide, 0.5) + 0.3, tall - 1);
    }));
    shown = { steps, rows, away, wide, tall, isLoss, ratio };
    const range = isLoss && sorted.length ? [low, high].map((x) => (ratio ? `${figure(Math.exp(x), 2)}x` : figure(Math.exp(x), 3))) : ["0 %", "100 %"];
    const more = found.of > found.nodes.length ? `. The first ${found.nodes.length} of ${found.of} nodes` : "";
    said.replaceChildren(scaleBar(VIEWS[view], ...range, shade), `. ${!isLoss ? "Empty: no value" : away.flat().some(Boolean) ? "Purple: absent" : "No node was absent"}${more}.`);
    canvas.setAttribute("aria-label", `${VIEWS[view]} of ${rows.length} nodes over steps, ${range.join(" to ")}`);
  }

  function readAt(x, y) {
    const row = Math.floor(y / shown.tall), at = Math.floor(x / shown.wide), value = shown.rows[row]?.[at];
    if (value === undefined) return "";
    const text = value === null ? (shown.away[row]?.[at] ? "absent" : "no value") : shown.ratio ? `${figure(value, 2)}x the median, ${figure(found.loss[row][at])}` : shown.isLoss ? figure(value) : share(value);
    return `node ${found.nodes[row]}, step ${shown.steps[at]}: ${text}`;
  }
  return { box, show(now) { found = now ?? found; show(); } };
}

// The timeline's section: when each node computed, sent and waited. Drag, or use the buttons, to zoom; new data keep the zoom.
export function timelinePicture(api) {
  const canvas = make("canvas", { class: "heat", role: "img", id: "timeline" }), said = make("p", { class: "soft" });
  const legend = make("p", { class: "legend" }), tools = make("div", { class: "bar tools" });
  const held = make("div", { class: "plot" }, canvas);
  reading(canvas, (x, y) => {
    const node = found.nodes[Math.floor(y / tallOf(found.nodes))], second = timeAt(x);
    const [, kind, first, until, name] = found.spans.find((span) => span[0] === node && span[2] <= second && second <= span[3]) ?? [];
    return kind && `node ${node}, ${seconds(second)}: ${KINDS[kind]?.[1] ?? kind}${name && name !== kind ? `, ${name}` : ""}, ${seconds(until - first)} long`;
  });
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
    const tall = tallOf(found.nodes), painted = brushOn(canvas, found.nodes.length, tall, RIGHT), { brush } = painted, sums = found.nodes.map(() => ({}));
    width = painted.width;
    names(brush, found.nodes, tall);
    const last = seconds(found.until_s), long = found.until_s - found.from_s;
    marks(painted, found.nodes.length * tall, found.from_s, found.until_s, (second) => width * (second - found.from_s) / long, seconds);
    const row = new Map(found.nodes.map((node, k) => [node, k]));
    for (const [node, kind, first, until] of found.spans) {
      brush.fillStyle = KINDS[kind]?.[0] ?? "#b8b8b8";
      brush.fillRect(LEFT + width * (first - found.from_s) / long, row.get(node) * tall, Math.max(width * (until - first) / long, 0.5), tall - 2);
      sums[row.get(node)][kind] = (sums[row.get(node)][kind] ?? 0) + until - first;
    }
    brush.fillStyle = getComputedStyle(document.body).color;
    const texts = sums.map((sum) => ["compute", "send", "wait"].map((kind) => `${Math.round(100 * (sum[kind] ?? 0) / long)}`).join(" / "));
    if (painted.isWide && tall > 8) texts.forEach((text, k) => brush.fillText(`${text} %`, LEFT + width + 10, (k + 0.5) * tall));
    const shares = Object.entries(found.shares).filter(([, part]) => part >= 0.005);
    const text = shares.map(([kind, part]) => `${KINDS[kind]?.[1] ?? kind} ${share(part)}`).join(", ");
    const cut = long < found.whole_s ? ` Shown: ${seconds(found.from_s)} to ${last} of ${seconds(found.whole_s)}.` : " Drag over the picture to zoom.";
    const away = found.spans.some(([, kind]) => kind === "absent") ? " Waiting includes absent." : "";
    said.textContent = `Predicted time.${painted.isWide && tall > 8 ? " Right: each node's computing / sending / waiting in the picture." : ""} Shares of the whole run: ${text}.${away}${cut}`;
    whole.hidden = window_ === null;
    canvas.setAttribute("aria-label", `activities of ${found.nodes.length} nodes from ${seconds(found.from_s)} to ${last}: ${text}`);
  }
  async function load() {
    const asked = window_, path = `${api}/timeline${asked ? `?from_s=${asked[0]}&to_s=${asked[1]}` : ""}`, now = await get(path);
    if (asked === window_) { found = now; show(); }
  }
  return { box, load };
}
