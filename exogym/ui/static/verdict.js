// What comparisons, sweeps and chosen runs come to, in words. A loss is the mean over seeds, with its standard deviation.

import { bytes, figure, isNumber } from "./base.js";

const ALIKE = 0.01;  // losses and bytes this close are called alike

export const labelOfRow = (row) => row.cell ?? row.strategy;
export const titleOfRow = (row) => row.title ?? labelOfRow(row);
export const spread = (row, name, form) => (isNumber(row[name]) ? form(row[name]) + (isNumber(row[`${name}_std`]) ? ` \u00b1 ${form(row[`${name}_std`])}` : "") : "");
export const times = (ratio) => (ratio < 1 ? ratio.toPrecision(2) : `${Number(ratio.toPrecision(ratio > 1.1 && ratio < 10 ? 2 : 3))}`);

const endOf = (row) => (isNumber(row.val_loss) ? row.val_loss : Infinity);  // a loss that is not finite arrives as text
// Who needs the fewest bytes to the target comes first, then who reached it in some runs, then by loss.
const rank = (row) => [isNumber(row.target_bytes) ? 0 : row.target_runs ? 1 : 2, row.target_bytes ?? 0, endOf(row)];
export const byBytes = (a, b) => rank(a).map((x, k) => x - rank(b)[k]).find((x) => x) ?? 0;
export const byLoss = (a, b) => endOf(a) - endOf(b);

// By name, with numbers in their order: H=5 before H=10.
export function byName(a, b) {
  const [x, y] = [a, b].map((text) => text.split(/(\d[\d.]*(?:e[+-]?\d+)?)/i));
  const k = x.findIndex((part, at) => part !== y[at]);
  return k < 0 || y[k] === undefined ? x.length - y.length : (k % 2 && x[k] - y[k]) || (x[k] < y[k] ? -1 : 1);
}

// The best of a comparison (by bytes) or sweep (by loss), and how much it saves; "" before a run has ended.
export function winnerOf({ rows = [], undecided = {} }, kind, isLong = false) {
  const [lowest] = [...rows].sort(byLoss), [first = {}] = rows.filter((row) => row.tx_bytes !== 0).sort(byBytes);
  if (!isNumber(lowest?.val_loss)) return "";
  const loss = spread(lowest, "val_loss", figure), open = (name) => (undecided[name] ? " (undecided)" : "");
  if (kind === "sweep") {
    const more = `, with a validation loss of ${loss}${undecided.val_loss ? "; its seeds don't separate it from other cells" : ""}`;
    return `Best cell: ${titleOfRow(lowest)}${isLong ? more : open("val_loss")}`;
  }
  if (!first.target_bytes) return `Lowest loss: ${titleOfRow(lowest)}, ${loss}${open("val_loss")}`;
  const base = rows.find((row) => /^ddp\b/i.test(labelOfRow(row)) && row !== first && isNumber(row.target_bytes));
  const than = base ? `, 1/${times(base.target_bytes / first.target_bytes)} of DDP's` : first.reduction > 1 ? `; in all it sends 1/${times(first.reduction)} of DDP's` : "";
  return `Fewest bytes: ${titleOfRow(first)}, ${bytes(first.target_bytes)}${than}${open("target_bytes")}`;
}

const NOT_TUNED = new Set(["num_nodes", "max_steps", "batch_size"]);
// What to try next, if a sweep's best cell has an axis's lowest or highest number.
export function beyond({ axes = {}, cells = [], best }) {
  const options = cells.find(({ cell }) => cell === best)?.options ?? {};
  const further = Object.entries(axes).flatMap(([name, given]) => {
    const values = given.map(Number), own = Number(options[name]), [low, high] = [Math.min(...values), Math.max(...values)];
    if (NOT_TUNED.has(name) || low === high || !values.every(isNumber)) return [];
    return own === low && own !== 1 && own > 0 ? [`lower ${name}`] : own === high && own !== 1 ? [`higher ${name}`] : [];
  });
  return further.length ? `The best cell is at the edge of the grid: try ${further.join(" and ")}.` : "";
}

// The bytes at which a run's loss first reached a value, between two evaluations by a straight line.
function bytesUntil(rows, loss) {
  const k = rows.findIndex((row) => row.val_loss <= loss), [a, b] = [rows[k - 1], rows[k]];
  return k > 0 ? a.tx_bytes + (b.tx_bytes - a.tx_bytes) * (a.val_loss - loss) / (a.val_loss - b.val_loss) : b.tx_bytes;
}

// A sentence on a few single runs {title, rows}: who needs the fewest bytes for the same loss, and who ends lowest.
export function verdictOf(runs, caveat) {
  const all = (found) => found.map(({ title }) => title).join(" and ");
  const verb = (found, text) => `${all(found)} ${text}${found.length > 1 ? "" : "s"}`;
  const isLost = ({ rows }) => typeof rows.findLast((row) => row.val_loss != null)?.val_loss === "string";
  const diverged = runs.filter(isLost).map(({ title }) => `${title} ends without a finite loss.`).join(" ");
  const known = runs.filter((run) => !isLost(run))
    .map(({ title, rows }) => ({ title, rows: rows.filter((row) => isNumber(row.val_loss) && isNumber(row.tx_bytes)) }))
    .filter(({ rows }) => rows.length);
  if (known.length < 2) return diverged;

  const ends = known.map(({ title, rows }) => ({ title, loss: rows.at(-1).val_loss })).sort((a, b) => a.loss - b.loss);
  const best = ends[0].loss, worst = ends.at(-1).loss, same = `the same loss (${figure(worst)})`;
  const needs = known.map(({ title, rows }) => ({ title, sent: bytesUntil(rows, worst) })).sort((a, b) => a.sent - b.sent);
  const [few, many] = [needs[0], needs.at(-1)], fewest = needs.filter(({ sent }) => sent <= few.sent * (1 + ALIKE));
  const lowest = ends.filter(({ loss }) => loss === best || loss - best < ALIKE * Math.abs(loss));

  let need = `${verb(fewest, "need")} ${times(many.sent / few.sent)}x fewer bytes for ${same} than ${many.title}`;
  if (known.length > 2) need = `${verb(fewest, "need")} the fewest bytes for ${same}, 1/${times(many.sent / few.sent)} of ${many.title}'s`;
  if (!few.sent) need = `${verb(fewest, "need")} no bytes for ${same}`;
  if (fewest.length === known.length) {
    const who = diverged ? all(known) : known.length > 2 ? "All" : "Both";
    need = `${who} need about ${bytes(few.sent)} for ${same}`;
  }
  let how = best > 0 ? `${(100 * (1 - best / worst)).toFixed(0)} % lower` : `lower, at ${figure(best)}`;
  if (known.length > 2) how = `with the lowest loss, ${figure(best)}`;
  let end = `${all(lowest) === all(fewest) ? `end${lowest.length > 1 ? "" : "s"}` : verb(lowest, "end")} ${how}`;
  if (lowest.length === known.length) end = "they end alike";
  return [`${need}, and ${end}.`, caveat, diverged].filter(Boolean).join(" ");
}
