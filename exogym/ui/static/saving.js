// A chart as a file: its values as CSV, its picture as PNG.

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

const ABOVE = 26, LINE = 17;
export const FONT = "system-ui, sans-serif";

export function png(plot, title, curves) {
  const scale = devicePixelRatio || 1, source = plot.ctx.canvas, { color, backgroundColor } = getComputedStyle(document.body);
  const canvas = make("canvas"), brush = canvas.getContext("2d");
  canvas.width = source.width;
  canvas.height = source.height + (ABOVE + LINE * curves.length + 6) * scale;
  brush.fillStyle = backgroundColor;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(source, 0, ABOVE * scale);
  brush.scale(scale, scale);
  brush.fillStyle = color;
  brush.font = `600 14px ${FONT}`;
  brush.fillText(title, 8, 18);
  brush.font = `12px ${FONT}`;
  curves.forEach((curve, k) => {
    const y = ABOVE + source.height / scale + LINE * k;
    brush.fillStyle = curve.color; brush.fillRect(10, y, 12, 10);
    brush.fillStyle = color; brush.fillText(curve.label, 28, y + 10);
  });
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}
