// Helpers for all pages. A run's own words become text (textContent), never markup.

export const POLL_MS = 1000, PART_BYTES = 2 ** 20, [WIDE, HIGH] = [70, 22];  // bytes of a run's files, read for one answer
export const store = { list: [], known: false, chosen: new Set() };  // known: the list has arrived

// The choices on a page stand in its address, after "?", so that a copied address shows the same.
const IN_ADDRESS = { text: "", state: "", sort: "started_s", down: true, inside: false, columns: "", axis: "step", logx: false, logy: false,
  smooth: 0, group: null, over: "tx_bytes", linear: false };
export const look = { ...IN_ADDRESS, nodes: "relative" };

// Take the choices from the address, where it has some; return the address without them.
export function fromAddress() {
  const [way, choices] = location.hash.split("?");
  for (const [key, text] of new URLSearchParams(choices ?? "")) {
    if (!Object.hasOwn(IN_ADDRESS, key)) continue;
    const kind = typeof IN_ADDRESS[key];
    look[key] = kind === "boolean" ? text === "1" : kind === "number" ? Math.min(Math.max(Number(text) || 0, 0), 0.98) : text;
  }
  return way;
}

// Write choices into the address; the defaults are left out.
export function toAddress(...keys) {
  const choices = new URLSearchParams();
  for (const key of keys) {
    if (look[key] !== IN_ADDRESS[key]) choices.set(key, look[key] === true ? "1" : look[key] === false ? "0" : look[key]);
  }
  const text = choices.toString(), [way] = location.hash.split("?");
  history.replaceState(null, "", `${way || "#/"}${text ? `?${text}` : ""}`);
}

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  for (const child of children) element.append(child instanceof Node ? child : String(child ?? ""));
  return element;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const noRun = (name) => new Error(`run '${name}' not found`);
export function address(name) {
  const parts = name.split("/");
  if (parts.includes(".") || parts.includes("..")) throw noRun(name);  // a browser would ask for another address
  return parts.map(encodeURIComponent).join("/");
}
export const figure = (value, digits = 4) => (isNumber(value) ? value.toFixed(digits) : "");
export const share = (value) => (isNumber(value) ? `${(100 * value).toFixed(0)} %` : "");
export const find = (name) => store.list.find((run) => run.name === name);

function scaled(value, units, base) {
  if (!isNumber(value)) return "";
  let k = 0;
  while (Math.abs(value) >= base && k < units.length - 1) { value /= base; k += 1; }
  return `${Number(value.toPrecision(3))} ${units[k]}`;
}
export const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
export const rate = (value) => scaled(value, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"], 1000);

export function seconds(value) {
  if (!isNumber(value)) return "";
  if (value > 0 && value < 0.1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} days`;
}

export function clock(at_ms) {
  const at = new Date(at_ms), isToday = at.toDateString() === new Date().toDateString();
  return at.toLocaleString([], { timeStyle: "short", ...(isToday ? {} : { dateStyle: "medium" }) });
}
// A state; of a running run also what is wrong with its nodes.
export function stateOf(state, { health = "", trouble = "" } = {}) {
  const isIll = state === "running" && trouble !== "";
  return make("span", { class: `state state-${state}${isIll ? " ill" : ""}`, title: health }, isIll ? `${state}, ${trouble.replaceAll(" ", "\u00a0")}` : state);
}
export const strategiesOf = (run) => make("span", { title: run.strategy ?? "" }, ...(run.strategies ?? []).flatMap((title, k) => [k ? ", " : "", make("span", { class: "whole" }, title)]));
export const ageOf = (run) => seconds(Math.max(0, Math.round(Date.now() / 1000 - (run.heard_s ?? run.started_s ?? 0))));

export async function get(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ?? answer.statusText);
  return found;
}

// Keep at most `most` rows, evenly over the steps: the first row of each interval. A full list doubles the interval.
function evenly(most) {
  let rows = [], width = 1;
  const place = (row) => Math.floor(row.step / width);
  return {
    get rows() { return rows; },
    take(row) {
      if (rows.length && place(rows.at(-1)) === place(row)) return;
      rows.push(row);
      while (rows.length > most) {
        width *= 2;
        rows = rows.filter((each, k) => k === 0 || place(each) !== place(rows[k - 1]));
      }
    },
  };
}

// Follow the averaged model's records. Each call reads the next part, of bounded size.
// `rows`: the records so far, thinned to `most`; `more`: whether another call would return more at once; `best`: the
// evaluation with the lowest loss.
export function followed(name, most) {
  let evaluated, others, newest, last, file, best;
  function begin() {
    evaluated = evenly(most / 2 - 1); others = evenly(most / 2 - 1); newest = best = null; last = -1; file = null;
  }
  begin();
  return async () => {
    const found = await get(`/api/runs/${address(name)}/records?node=none&after=${last}&most=${most}&most_bytes=${PART_BYTES}`);
    if (found.last < last || (file !== null && found.file !== file)) {  // the run resumed from an earlier step
      begin();
      return { rows: [], more: true, best: null };
    }
    for (const row of found.records) {
      (isNumber(row.val_loss) ? evaluated : others).take(row); newest = row;
      if (isNumber(row.val_loss) && !(best?.val_loss <= row.val_loss)) best = row;
    }
    last = found.last; file = found.file;
    const rows = [...evaluated.rows, ...others.rows].sort((a, b) => a.step - b.step);
    if (newest !== null && rows.at(-1) !== newest) rows.push(newest);
    return { rows, more: found.more, best };
  };
}

export async function send(path, body) {
  const answer = await fetch(path, { method: "POST", credentials: "same-origin",
    headers: { "Content-Type": "application/json" }, body: JSON.stringify(body ?? {}) });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error ?? answer.statusText), { status: answer.status });
  return found;
}

// A bar of a picture's colors, with what it shows, and between its lowest and its highest value. `colorAt`: the color of a share from 0 to 1.
export function scaleBar(title, low, high, colorAt) {
  const bar = make("span", { class: "scale" });
  bar.style.backgroundImage = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(colorAt).join(", ")})`;
  return make("span", { class: "soft" }, `${title} ${low}`, bar, high);
}

// Gray bars where a page's content will be.
export const skeleton = () => make("div", { class: "skeleton", "aria-hidden": "true" },
  ...Array.from({ length: 5 }, () => make("span", { class: "bone" })));

// A small curve of numbers in order.
export function spark(values, low = Math.min(...values), high = Math.max(...values)) {
  const scale = devicePixelRatio || 1, picture = make("canvas", { class: "spark", width: WIDE * scale, height: HIGH * scale, "aria-hidden": "true" }), brush = picture.getContext("2d");
  brush.scale(scale, scale);
  brush.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--link"); brush.lineWidth = 1.4;
  values.forEach((y, k) => brush.lineTo(k / (values.length - 1) * WIDE, 1 + (HIGH - 2) * (high > low ? (high - y) / (high - low) : 0.5)));
  brush.stroke();
  return picture;
}

// A table in a box that scrolls sideways on narrow screens. heads: [title, is a number].
export function table(heads, body) {
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map(
    ([title, number]) => make("th", { class: number ? "number" : "", scope: "col" }, title)))), body));
}

// The buttons that apply now; `show` takes the server's answer. Stop first says what stays.
export function actionsOf(name) {
  const box = make("div", { class: "bar" }), said = make("p", { class: "soft", role: "status" });
  let shown = "{}";
  async function ask(what) {
    box.replaceChildren();
    try { await send(`/api/runs/${address(name)}/${what}`); said.textContent = `asked it to ${what}`; }
    catch (error) { said.textContent = error.message; }
  }
  function begin(found) {
    said.textContent = found.not_here ?? "";
    const button = (text, id, title, onclick) => make("button", { type: "button", id, title, onclick }, text);
    box.replaceChildren(
      ...(found.stop ? [button("Stop", "stop", found.stop, () => confirm(found))] : []),
      ...(found.resume ? [button("Resume", "resume", found.resume, () => ask("resume"))] : []));
  }
  function confirm(found) {
    said.textContent = found.stop;
    const keep = make("button", { type: "button", id: "keep-running", onclick() { begin(found); } }, "Keep it running");
    box.replaceChildren(make("button", { type: "button", id: "stop-now", onclick() { ask("stop"); } }, "Stop it"), keep);
    keep.focus();
  }
  return { box: make("div", { class: "actions" }, said, box), show(found = {}) {
    const text = JSON.stringify(found);
    if (text !== shown) { shown = text; begin(found); }
  } };
}

// A link to the form with a run's options. It appears where the page may start runs.
export function againLink(name) {
  const link = make("a", { id: "again", href: `#/new?again=${encodeURIComponent(name)}`, hidden: true }, "Again, with changes");
  return { link, show(run) { link.hidden = !run.may_start; } };
}

// "Shakespeare, 5 strategies", or the folder's name.
export function titled(run) {
  const of = { comparison: () => `${run.task}, ${run.strategy.includes(",") ? `${run.strategy.split(",").length} strategies` : run.strategy}`, sweep: () => `${run.task}, sweep of ${run.total_steps} runs` }[run.kind];
  return run.title || (of && run.task && run.total_steps !== null && (run.kind === "sweep" || run.strategy) ? of() : run.name.split("/").at(-1));
}

// A heading with a run's title, which a click makes editable, and its folder below.
export function heading(name) {
  const title = make("h2", { id: "title" }), folder = make("p", { class: "soft", id: "folder" }, name);
  const field = make("input", { type: "text", maxlength: "120", "aria-label": "title", hidden: true });
  const edit = make("button", { type: "button", id: "rename", class: "quiet", title: "Rename", onclick() {
    field.value = title.textContent; field.hidden = false; title.hidden = edit.hidden = true; field.focus(); field.select();
  } }, "Rename");
  async function done(save) {
    if (field.hidden) return;
    field.hidden = true; title.hidden = edit.hidden = false;
    if (!save || field.value === title.textContent) return;
    try { box.fill({ ...find(name), name, ...await send(`/api/runs/${address(name)}/notes`, { title: field.value }) }); }
    catch (error) { folder.hidden = false; folder.textContent = error.message; }
  }
  field.addEventListener("keydown", (event) => {
    if (!["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault(); done(event.key === "Enter"); edit.focus();  // the key itself does not press the button
  });
  field.addEventListener("blur", () => done(true));
  const box = make("div", { class: "heading" }, title, field, edit, folder);
  box.fill = (run) => { if (field.hidden) title.textContent = titled(run); folder.hidden = titled(run) === name; };
  box.fill(find(name) ?? { name });
  return box;
}

const UNITS = { "network.up": rate, "network.down": rate, "network.latency": seconds, "network.jitter": seconds, step_seconds: seconds, "step_seconds.seconds": seconds };
// The options of a description as [key, name, text]; an option inside another has its name as KEY.NAME.
export function optionsOf(description) {
  const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : `${value}`);
  const text = (value, name) => { const form = UNITS[name]; return form && [value].flat().every(isNumber) ? [value].flat().map(form).join(", ") : plain(value); };
  const isDict = (value) => typeof value === "object" && !Array.isArray(value);
  return Object.entries(description).filter(([, value]) => value !== null).flatMap(([key, value]) => (isDict(value)
    ? Object.entries(value).filter(([, one]) => one !== null).map(([name, one]) => [key, `${key}.${name}`, text(one, `${key}.${name}`)]) : [[key, key, text(value, key)]]));
}

// Buttons of which one is chosen. choices: value to title.
export function tabs(label, choices, chosen, changed) {
  const box = make("div", { class: "tabs", role: "group", "aria-label": label });
  const show = (now) => { for (const tab of box.children) tab.setAttribute("aria-pressed", String(tab.value === now)); };
  box.append(...Object.entries(choices).map(([value, title]) => make("button", { type: "button", value,
    onclick() { show(value); changed(value); } }, title)));
  show(chosen);
  return box;
}

// A form with a run's tags and note.
export function notes(name) {
  const at = make("span", { class: "soft", role: "status" });
  const tags = make("input", { type: "text", id: "tags", placeholder: "tags, separated by commas", maxlength: "800" });
  const note = make("textarea", { id: "note", rows: "2", placeholder: "note", maxlength: "4000" });
  let filled = false;
  const form = make("form", { class: "notes choices", async onsubmit(event) {
    event.preventDefault();
    try {
      const words = tags.value.split(",").map((word) => word.trim()).filter(Boolean);
      const found = await send(`/api/runs/${address(name)}/notes`, { tags: words, note: note.value });
      tags.value = found.tags.join(", "); note.value = found.note; at.textContent = "saved";
    } catch (error) { at.textContent = error.message; }
  } }, make("label", {}, "Tags ", tags), make("label", {}, "Note ", note),
  make("button", { type: "submit", id: "keep" }, "Save"), at);
  form.fill = (run) => {
    if (!filled) { tags.value = (run.tags ?? []).join(", "); note.value = run.note ?? ""; }
    filled = true;
  };
  return form;
}

// A text with a button that copies it.
export function copied(title, text) {
  const button = make("button", { type: "button", async onclick() {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(box); button.textContent = "Selected"; }
  } }, "Copy");
  const box = make("pre", { tabindex: "0" }, text);
  return make("div", { class: "copied choices" }, make("h3", {}, title), button, box);
}
