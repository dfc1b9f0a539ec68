// Curves in one chart, over steps, bytes or seconds. Readers can zoom, read values by pointer and keys, and save files.

import { bytes, isNumber, look, make, tabs, toAddress } from "./base.js";
import { csv, download, FONT, png } from "./saving.js";

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a8a8a"];
const DARK = ["#56b4e9", "#ee8a45", "#2fc79a", "#dd9ac0", "#8fa8ff", "#f0c24b", "#a8a8a8"];
const HEIGHT = 220, MOST_NAMED = 12, CLOSER = 0.6, FADED = 0.2, STRIP = 6, BEYOND = 1.15;
const AXES = { step: "steps", tx_bytes: "bytes sent per node", wall_s: "wall time (s)", time_s: "predicted time (s)" };
export const TABS = { tx_bytes: "Bytes", step: "Steps", time_s: "Predicted time", wall_s: "Wall time" };

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.plot && target.clientWidth) target.plot.setSize({ width: target.clientWidth, height: target.tall ?? HEIGHT });
  }
});

// Tabs for what the curves are over, which `look[over]` holds, and a bar with boxes (key to title), smoothing and `more`.
export function axisChoice(over, boxes, changed, ...more) {
  const change = (key, value) => { look[key] = value; changed(); toAddress(over, ...Object.keys(boxes), "smooth", "group"); };
  const all = Object.entries(boxes).map(([id, title]) => make("label", {}, make("input", { type: "checkbox", id, checked: look[id],
    onchange({ target }) { change(id, target.checked); } }), title));
  const smooth = make("input", { type: "range", id: "smoothing", min: "0", max: "0.98", step: "0.02", oninput() { change("smooth", Number(smooth.value)); } });
  smooth.value = look.smooth;
  return [tabs("Curves over", TABS, look[over], (value) => change(over, value)),
    make("div", { class: "bar choices" }, ...all, make("label", {}, "Smoothing ", smooth), ...more)];
}

// Holders for charts, one per title.
export function places(titles) {
  const holders = Object.fromEntries(titles.map((title) => [title, make("div", { class: "chart", hidden: true })]));
  for (const holder of Object.values(holders)) sizes.observe(holder);
  return { holders, box: make("div", { class: "charts" }, ...Object.values(holders)) };
}

// The exponential moving mean, without a bias to where it begins.
export function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (!weight || !isNumber(value)) return value;
    mean = weight * mean + (1 - weight) * value; mass = weight * mass + 1 - weight;
    return mean / mass;
  });
}

// The points of a curve that its axes can show, in order, smoothed.
function prepared(curve, view) {
  const shown = (value, isLog) => isNumber(value) && (!isLog || value > 0);
  const order = curve.x.map((_, k) => k).filter((k) => shown(curve.x[k], view.logx) && shown(curve.y[k], view.logy));
  order.sort((a, b) => curve.x[a] - curve.x[b]);
  const of = (values) => smoothed(order.map((k) => (shown(values[k], view.logy) ? values[k] : null)), view.smooth);
  const lists = [order.map((k) => curve.x[k]), of(curve.y)];
  return { ...curve, band: Boolean(curve.low), lists: curve.low ? [...lists, of(curve.low), of(curve.high)] : lists };
}

const short = (value) => `${Number(value.toPrecision(5))}`;

// A small box with a curve's color and dashes.
export function markOf({ color, dash }) {
  const mark = make("span", { class: "mark" }), at = (k) => dash.slice(0, k).reduce((a, b) => a + b, 0);
  mark.style.backgroundColor = color;
  const parts = dash.flatMap((_, k) => [`${k % 2 ? "#0000" : "#000"} ${at(k)}px`, `${k % 2 ? "#0000" : "#000"} ${at(k + 1)}px`]);
  if (dash.length) mark.style.maskImage = `repeating-linear-gradient(90deg, ${parts.join(", ")})`;
  return mark;
}

// Place a box beside the pointer, on the side with more room.
export function beside(tip, left, wide) {
  tip.style.left = left > wide / 2 ? "" : `${left + 12}px`;
  tip.style.right = left > wide / 2 ? `${wide - left + 12}px` : "";
}

// The value at a place, or at the nearest place that has one.
function near(values, at) {
  for (let k = 0; k < values.length; k += 1) {
    for (const place of [at - k, at + k]) if (isNumber(values[place])) return values[place];
  }
  return null;
}

// Draw a chart of several curves {label, x: [...], y: [...]}, with an optional color, and low and high for a band.
// Points without numbers are left out. A lone point's low and high are a bar. `holder.spans` lists areas {from, to, label, color}. `view` has the axis, logx, logy and smooth; the reader's choices are the default.
export function draw(holder, title, curves, view = look) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches, colors = dark ? DARK : LIGHT;
  const shown = curves.map((curve) => prepared(curve, view)).filter((curve) => curve.lists[0].length);
  holder.hidden = !shown.length;
  if (!shown.length) { holder.plot?.destroy(); holder.plot = null; return; }
  const data = uPlot.join(shown.map((curve) => curve.lists));
  let next = 1;
  shown.forEach((curve, k) => {
    curve.color ??= colors[k % colors.length];
    curve.dash ??= k >= colors.length ? [3, 2] : [];
    curve.at = next; next += curve.band ? 3 : 1;
  });
  Object.assign(holder, { curves: shown, view: { ...view } });
  const scale = `${view.axis} ${view.logx}`, key = `${title} ${scale} ${view.logy} ${dark} ${shown.map((c) => [c.label, c.band, c.color, c.dash]).join("\n")}`;
  if (holder.scale !== scale) holder.zoom = null;
  if (holder.plot && holder.key === key) {
    holder.plot.setData(data, !holder.zoom);
    if (holder.zoom) { holder.plot.setScale("x", holder.zoom); holder.plot.redraw(); }
    return;
  }
  holder.plot?.destroy();
  Object.assign(holder, { key, scale });
  begin(holder, title, data);
}

// A logarithmic scale that ends near the data, not at the next power of ten, and its marks.
const scaled = (isLog) => (isLog ? { distr: 3, range: (_, low, high) => [low / BEYOND, high * BEYOND] } : {});
const DIGITS = [[1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]];
function marksOfLog(self, axis, low, high) {
  const first = Math.floor(Math.log10(low)), powers = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, k) => 10 ** (first + k));
  const marks = (digits) => powers.flatMap((power) => digits.map((digit) => Number((digit * power).toPrecision(3)))).filter((x) => x >= low && x <= high);
  const places = (found) => found.map((x) => self.valToPos(x, axis ? "y" : "x")), room = axis ? 22 : 58;
  return DIGITS.map(marks).find((found) => places(found).every((at, k, all) => !k || Math.abs(at - all[k - 1]) >= room)) ?? marks([1]);
}

// A bar from a point's low to its high.
function bar({ ctx, valToPos }, { color, lists: [[x], , [low], [high]] }) {
  ctx.fillStyle = color;
  ctx.fillRect(valToPos(x, "x", true) - 1, valToPos(high, "y", true), 2, valToPos(low, "y", true) - valToPos(high, "y", true));
}

// Strips at the top of the chart, with their names where there is room.
function areas({ ctx, bbox, valToPos, scales: { x: { min, max } } }, spans, text) {
  const scale = devicePixelRatio || 1;
  ctx.save();
  Object.assign(ctx, { font: `${11 * scale}px ${FONT}`, textAlign: "left", textBaseline: "top" });
  for (const { from, to, label, color } of spans.filter((span) => span.to > min && span.from < max)) {
    const [left, right] = [Math.max(from, min), Math.min(to, max)].map((x) => valToPos(x, "x", true));
    ctx.fillStyle = color; ctx.fillRect(left, bbox.top, Math.max(right - left, 1), STRIP * scale);
    ctx.fillStyle = text;
    if (ctx.measureText(label).width < right - left - 8) ctx.fillText(label, left + 4, bbox.top + (STRIP + 4) * scale);
  }
  ctx.restore();
}

// Write a point's name beside it.
function named({ ctx, bbox, valToPos }, { label, lists: [[x], [y]] }, color) {
  const left = valToPos(x, "x", true), isLeft = left < bbox.left + bbox.width / 2, away = 9 * (devicePixelRatio || 1);
  ctx.save();
  Object.assign(ctx, { fillStyle: color, font: `${1.3 * away}px ${FONT}`, textAlign: isLeft ? "left" : "right", textBaseline: "middle" });
  ctx.fillText(label, left + (isLeft ? away : -away), valToPos(y, "y", true));
  ctx.restore();
}

function begin(holder, title, data) {
  const { curves: shown, view } = holder, strong = shown.filter((curve) => !curve.faint), text = getComputedStyle(document.body).color, tall = holder.tall ?? HEIGHT;
  const inBytes = title.startsWith("bytes"), ofX = (x) => (view.axis === "tx_bytes" ? bytes(x) : short(x));
  const ofY = (y) => (inBytes ? bytes(y) : short(y));
  const [line, back] = ["--line", "--back"].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name));
  const style = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line } };
  const ticks = (isLog) => (isLog ? { splits: marksOfLog, filter: (_, found) => found } : {});
  const marks = (form) => (_, found) => found.map((value) => (value === null ? "" : form(value)));
  const series = shown.flatMap((curve) => {
    const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
    const main = { label: curve.label, stroke: curve.faint ? `${curve.color}77` : curve.color, width: curve.faint ? 1 : 1.8, spanGaps: true,
      points: { show: curve.lists[0].length < 2, size: 11, width: 2, fill: curve.dash.length ? back : curve.color },
      dash: curve.dash.map((part) => 1.8 * part) };
    return curve.band ? [main, { ...edge, label: `${curve.label}, low` }, { ...edge, label: `${curve.label}, high` }] : [main];
  });
  const tip = make("div", { class: "tip", hidden: true }), said = make("p", { class: "unseen", role: "status" });
  const reset = make("button", { type: "button", class: "reset", hidden: true, onclick() { zoom(null); } }, "Reset zoom");
  const picture = make("div", { class: "plot", tabindex: "0", role: "group",
    "aria-label": `${title}: arrow keys read the values, + zooms, 0 resets` });
  let at = null;
  const save = (ending, made) => async () => download(`${title.replaceAll(" ", "_")}.${ending}`, await made());
  const button = (ending, made) => make("button", { type: "button", onclick: save(ending, made) }, ending.toUpperCase());
  const tools = make("details", { class: "tools" }, make("summary", {}, "Save"), make("div", { class: "bar" },
    button("csv", () => csv([AXES[view.axis], ...plot.series.slice(1).map((one) => one.label)], plot.data)),
    button("png", () => png(plot, title, holder.curves))));
  const legend = make("p", { class: "legend", hidden: holder.plain || shown.length < 2 || strong.length > MOST_NAMED }, ...strong.map((curve) => make("span", {}, markOf(curve), curve.label)),
    strong.length < shown.length ? make("span", { class: "soft" }, `gray: ${shown.length - strong.length} more`) : "");
  holder.replaceChildren(make("h3", {}, title), legend, picture, said, reset, tools);

  const lines = (k) => holder.curves.map((curve) => [curve, near(plot.data[curve.at], k)]).filter(([curve, y]) => y !== null && !curve.faint).slice(0, MOST_NAMED);
  function point(k) {
    tip.hidden = k === null || k === undefined;
    if (tip.hidden) return;
    const x = plot.data[0][k], left = plot.valToPos(x, "x");
    tip.replaceChildren(make("strong", {}, `${AXES[view.axis]} ${ofX(x)}`),
      ...lines(k).map(([curve, y]) => make("span", {}, markOf(curve), `${curve.label} ${ofY(y)}`)));
    beside(tip, left, plot.over.clientWidth);
  }
  const plot = new uPlot({
    width: holder.clientWidth || 320, height: tall, legend: { show: false }, focus: { alpha: FADED },
    scales: { x: { time: false, ...scaled(view.logx) }, y: scaled(view.logy) },
    axes: [{ ...style, size: 34, labelSize: 20, label: AXES[view.axis], values: marks(ofX), ...ticks(view.logx) }, { ...style, size: 62, values: marks(ofY), ...(holder.label ? { label: holder.label, labelSize: 18 } : {}), ...ticks(view.logy) }],
    series: [{ label: AXES[view.axis] }, ...series],
    bands: strong.filter((curve) => curve.band).map((curve) => ({ series: [curve.at + 2, curve.at + 1], fill: `${curve.color}33` })),
    hooks: {
      drawClear: [(self) => areas(self, holder.spans ?? [], text)],
      draw: [(self) => holder.curves.forEach((curve) => {
        if (curve.band && !curve.faint && curve.lists[0].length === 1) bar(self, curve);
        if (curve.named) named(self, curve, text);
      })],
      setCursor: [(self) => point(self.cursor.left < 0 ? null : self.cursor.idx)],
      setSelect: [(self) => { if (self.select.width > 0) {
        keep({ min: self.posToVal(self.select.left, "x"), max: self.posToVal(self.select.left + self.select.width, "x") });
      } }],
    },
  }, data, picture);
  holder.plot = plot;
  plot.over.append(tip);
  plot.over.addEventListener("dblclick", () => zoom(null));

  function keep(range) { holder.zoom = range; reset.hidden = !range; }
  function zoom(range) {
    keep(range);
    if (range) plot.setScale("x", range); else plot.setData(plot.data);
  }
  picture.addEventListener("keydown", (event) => {
    const xs = plot.data[0], { min, max } = plot.scales.x, far = event.shiftKey ? 10 : 1;
    const inside = (k) => Math.min(Math.max(k, xs.findIndex((x) => x >= min)), xs.findLastIndex((x) => x <= max));
    const to = { ArrowRight: (at ?? -1) + far, ArrowLeft: (at ?? xs.length) - far, Home: 0, End: xs.length - 1 }[event.key];
    if (to !== undefined) {
      at = inside(to);
      point(at);
      said.textContent = `${AXES[view.axis]} ${ofX(xs[at])}: ${lines(at).map(([curve, y]) => `${curve.label} ${ofY(y)}`).join(", ")}`;
    } else if (event.key === "+") {
      const middle = at === null ? (min + max) / 2 : xs[at];
      zoom({ min: middle - CLOSER * (middle - min), max: middle + CLOSER * (max - middle) });
    } else if (event.key === "0" || event.key === "Escape") zoom(null);
    else return;
    event.preventDefault();
  });
  picture.addEventListener("blur", () => point(null));

  // Let the others fade; null shows all alike.
  holder.focusOn = (label) => {
    const found = holder.curves.find((curve) => curve.label === label);
    plot.setSeries(found ? found.at : null, { focus: true }, false);
  };
  if (holder.zoom) zoom(holder.zoom);
}
