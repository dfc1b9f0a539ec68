// A sweep's cells as tables, colored by loss.

import { bytes, figure, isNumber, make, scaleBar, table } from "./base.js";
import { spread } from "./verdict.js";

let turns = 0;  // how often the reader turned the axes

const said = (cell) => [spread(cell, "loss", figure), cell.seeds < cell.wanted ? `(${cell.seeds} of ${cell.wanted} seeds)` : ""].join(" ").trim();

// Strong blue is a low loss. The text is dark in the light and the dark theme.
const colorAt = (part) => `hsl(210 ${75 - 25 * part}% ${66 + 28 * part}%)`;

function coloured(cell, low, high, best, point) {
  const found = make("td", { class: `number cell${cell.cell === best ? " best" : ""}`, tabindex: "0", onmouseenter() { point(cell.cell); },
    onmouseleave() { point(null); }, onfocus() { point(cell.cell); }, onblur() { point(null); } }, said(cell), " ", make("small", {}, [cell.cell === best ? "best" : "", bytes(cell.tx_bytes)].filter(Boolean).join(", ")));
  if (isNumber(cell.loss)) {
    const part = high > low ? (Math.log(Math.max(cell.loss, 1e-12)) - low) / (high - low) : 0;
    found.style.background = colorAt(part);
    found.classList.add("filled");
  }
  return found;
}

// `point` takes the cell under the pointer, or null. Without two axes there is no grid: the page's table names the cells.
export function grid(found, again, point) {
  const losses = found.cells.map((cell) => cell.loss).filter(isNumber).map((x) => Math.log(Math.max(x, 1e-12)));
  const low = Math.min(...losses), high = Math.max(...losses);
  const of = (cell) => coloured(cell, low, high, found.best, point);
  const axes = Object.keys(found.axes).filter((name) => found.axes[name].length > 1);
  if (!found.is_grid || axes.length < 2) return [];
  const scale = make("p", {}, scaleBar("validation loss, mean \u00b1 standard deviation over seeds, and bytes sent per node:", ...[low, high].map((x) => figure(Math.exp(x))), colorAt));
  for (let k = 0; k < turns % axes.length; k += 1) axes.push(axes.shift());
  const [down, across, ...others] = axes, turn = make("button", { type: "button", id: "turn", onclick() { turns += 1; again(); } }, "Turn the axes");
  let rest = [{}];
  for (const name of others) rest = rest.flatMap((one) => found.axes[name].map((value) => ({ ...one, [name]: value })));
  const named = new Map(found.cells.map((cell) => [JSON.stringify(axes.map((name) => cell.options[name])), cell]));
  const tables = rest.map((one) => {
    const heads = [[`${down} \u2193 ${across} \u2192`, false], ...found.axes[across].map((x) => [x, true])];
    const rows = found.axes[down].map((row) => make("tr", {}, make("th", { scope: "row" }, row),
      ...found.axes[across].map((column) => {
        const options = { ...one, [down]: row, [across]: column };
        const cell = named.get(JSON.stringify(axes.map((name) => options[name])));
        return cell ? of(cell) : make("td");
      })));
    const title = Object.entries(one).map(([name, value]) => `${name}=${value}`).join(", ");
    return make("div", {}, make("h3", {}, title), table(heads, make("tbody", {}, ...rows)));
  });
  return [losses.length ? scale : "", turn, make("div", { class: "grids" }, ...tables)];
}
