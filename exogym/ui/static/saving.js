// A chart as a file: its values as CSV, its picture as PNG or SVG.

import { make } from "./base.js";

export function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const quoted = (text) => (/[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : String(text));

// heads: a title per column; columns: as many lists of equal length.
export function csv(heads, columns) {
  const rows = columns[0].map((_, k) => columns.map((column) => column[k] ?? "").join(","));
  return new Blob([[heads.map(quoted).join(","), ...rows].join("\n"), "\n"], { type: "text/csv" });
}

function look() {
  const style = getComputedStyle(document.documentElement);
  return { back: style.getPropertyValue("--back").trim(), text: style.getPropertyValue("--text").trim(),
    line: style.getPropertyValue("--line").trim() };
}

const ABOVE = 26, LINE = 17;
export const FONT = "system-ui, sans-serif";
const NAMESPACE = ["http:", "", "www.w3.org", "2000", "svg"].join("/");  // a name: nothing is loaded from there

export function png(plot, title, curves) {
  const scale = devicePixelRatio || 1, source = plot.ctx.canvas, { back, text } = look();
  const canvas = make("canvas"), brush = canvas.getContext("2d");
  canvas.width = source.width;
  canvas.height = source.height + (ABOVE + LINE * curves.length + 6) * scale;
  brush.fillStyle = back;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(source, 0, ABOVE * scale);
  brush.scale(scale, scale);
  brush.fillStyle = text;
  brush.font = `600 14px ${FONT}`;
  brush.fillText(title, 8, 18);
  brush.font = "12px system-ui, sans-serif";
  curves.forEach(({ label, color }, k) => {
    const y = ABOVE + source.height / scale + LINE * k;
    brush.fillStyle = color; brush.fillRect(10, y, 12, 10);
    brush.fillStyle = text; brush.fillText(label, 28, y + 10);
  });
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

const safe = (text) => String(text).replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);

export function svg(plot, title, axes, curves) {
  const { back, text, line } = look(), { offsetLeft: left, offsetTop, clientWidth: wide, clientHeight: tall } = plot.over;
  const top = offsetTop + ABOVE, parts = [], { min, max } = plot.scales.x, xs = plot.data[0];
  const px = (value) => (left + plot.valToPos(value, "x")).toFixed(1), py = (value) => (top + plot.valToPos(value, "y")).toFixed(1);
  const write = (x, y, words, anchor) => parts.push(`<text x="${x}" y="${y}" text-anchor="${anchor}">${safe(words)}</text>`);
  const ticks = (axis) => axis._splits.map((split, k) => [split, axis._values[k]]).filter(([split, words]) => split !== null && words !== "");
  for (const [split, words] of ticks(plot.axes[0])) {
    parts.push(`<path d="M${px(split)} ${top}V${top + tall}" stroke="${line}"/>`);
    write(px(split), top + tall + 16, words, "middle");
  }
  for (const [split, words] of ticks(plot.axes[1])) {
    parts.push(`<path d="M${left} ${py(split)}H${left + wide}" stroke="${line}"/>`);
    write(left - 6, Number(py(split)) + 4, words, "end");
  }
  write(left + wide / 2, top + tall + 34, axes, "middle");
  const points = (values) => xs.map((x, k) => [x, values[k]])
    .filter(([x, y]) => y !== null && y !== undefined && x >= min && x <= max).map(([x, y]) => `${px(x)} ${py(y)}`);
  for (const { at, color, dash, band } of curves) {
    if (band) {
      const around = [...points(plot.data[at + 1]), ...points(plot.data[at + 2]).reverse()];
      if (around.length) parts.push(`<path d="M${around.join("L")}Z" fill="${color}" fill-opacity=".2"/>`);
    }
    const found = points(plot.data[at]);
    if (found.length) parts.push(`<path d="M${found.join("L")}" fill="none" stroke="${color}" stroke-width="1.6"${dash.length ? ` stroke-dasharray="${dash.map((part) => 1.8 * part).join(" ")}"` : ""}/>`);
  }
  const below = top + tall + 48, height = below + LINE * curves.length;
  curves.forEach(({ label, color }, k) => {
    parts.push(`<rect x="10" y="${below + LINE * k - 6}" width="12" height="10" fill="${color}"/>`);
    write(28, below + LINE * k + 4, label, "start");
  });
  return new Blob([`<svg xmlns="${NAMESPACE}" width="${plot.width}" height="${height}" viewBox="0 0 ${plot.width} ${height}" `
    + `font-family="${FONT}" font-size="12" fill="${text}"><rect width="100%" height="100%" fill="${back}"/>`
    + `<text x="8" y="18" font-weight="600" font-size="14">${safe(title)}</text>${parts.join("")}</svg>`], { type: "image/svg+xml" });
}
