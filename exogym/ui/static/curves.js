// Curves in one chart, over steps, bytes or seconds.

import { bytes, isNumber, look, make } from "./base.js";

const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a8a8a"];
const DARK = ["#56b4e9", "#ee8a45", "#2fc79a", "#dd9ac0", "#8fa8ff", "#f0c24b", "#a8a8a8"];
const HEIGHT = 220, MOST_NAMED = 12;
export const AXES = {
  step: "steps", tx_bytes: "bytes sent per node", wall_s: "wall time (s)", time_s: "predicted time (s)",
};

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.plot && target.clientWidth) target.plot.setSize({ width: target.clientWidth, height: HEIGHT });
  }
});

export function axisChoice(change) {
  const select = make("select", { id: "axis", onchange(event) { look.axis = event.target.value; change(); } });
  for (const [key, title] of Object.entries(AXES)) select.append(make("option", { value: key }, title));
  select.value = look.axis;
  return make("label", {}, "Curves over ", select);
}

// Holders for charts, one per title.
export function places(titles) {
  const holders = Object.fromEntries(titles.map((title) => [title, make("div", { class: "chart", hidden: true })]));
  for (const holder of Object.values(holders)) sizes.observe(holder);
  return { holders, box: make("div", { class: "charts" }, ...Object.values(holders)) };
}

// Draw a chart of several curves {label, x: [...], y: [...]}. Points without numbers are left out.
export function draw(holder, title, curves) {
  const shown = curves.filter((curve) => curve.y.some(isNumber));
  holder.hidden = !shown.length;
  if (!shown.length) { holder.plot?.destroy(); holder.plot = null; return; }
  const data = uPlot.join(shown.map((curve) => {
    const points = curve.x.map((x, k) => [x, curve.y[k]]).filter(([x, y]) => isNumber(x) && isNumber(y));
    points.sort((a, b) => a[0] - b[0]);
    return [points.map((point) => point[0]), points.map((point) => point[1])];
  }));
  const key = `${look.axis} ${shown.map((curve) => curve.label).join("\n")}`;
  if (holder.plot && holder.key === key) { holder.plot.setData(data); return; }
  holder.plot?.destroy();
  const colours = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  const text = getComputedStyle(document.body).color;
  const line = getComputedStyle(document.documentElement).getPropertyValue("--line");
  const style = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line } };
  const marks = (name, values) => values.map((x) => (name === "tx_bytes" ? bytes(x) : `${x}`));
  holder.replaceChildren(make("h3", {}, title));
  holder.key = key;
  holder.plot = new uPlot({
    width: holder.clientWidth || 320, height: HEIGHT, legend: { show: shown.length <= MOST_NAMED }, scales: { x: { time: false } },
    axes: [{ ...style, label: AXES[look.axis], values: (_, found) => marks(look.axis, found) },
      { ...style, size: 62, values: (_, found) => marks(title.startsWith("bytes") ? "tx_bytes" : "", found) }],
    series: [{ label: AXES[look.axis] }, ...shown.map((curve, k) => ({
      label: curve.label, stroke: colours[k % colours.length], width: 1.6, spanGaps: true, points: { show: false },
      dash: k >= colours.length ? [5, 3] : undefined,
    }))],
  }, data, holder);
}
