// A form that starts a comparison or a sweep. Its choices stand in the address, and the server checks them while you type.

import { address, get, make, POLL_MS, send } from "./base.js";
import { fieldOf, helpOf, strategyChips } from "./chips.js";

const PAUSE_MS = 300;  // from the last key to a check
const CHIPS = { strategies: Infinity, strategy: 1 };  // options shown as chips, and how many may be chosen
const label = (option) => option.flag.replace(/^--/, "");

export function newPage(main) {
  const at = make("p", { class: "soft", role: "status", id: "answer" }), note = make("p", { class: "soft", id: "note" });
  const fields = make("div"), plan = make("p", { id: "plan", role: "status" });
  const kind = make("select", { id: "command", onchange() { show({}); changed(); } }), started = make("section");
  const button = make("button", { type: "submit", id: "start" }, "Start");
  const guess = make("button", { type: "button", id: "estimate", title: "Trains each strategy for about a second, and prints the time and memory that all runs need.",
    async onclick() {
      const before = JSON.stringify(given()), body = { command: kind.value, options: given() };
      trying = guess.disabled = true; guessed.textContent = "Trying each strategy for about a second.";
      const found = await send("/api/estimate", body).catch((error) => ({ text: error.message }));
      guessed.textContent = before === JSON.stringify(given()) ? found.text : "";  // it may be of other options by now
      trying = false; guess.disabled = button.disabled;
    } }, "Estimate"), guessed = make("pre", { id: "estimated", role: "status" });
  const form = make("form", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      const found = await send("/api/start", { command: kind.value, options: given() });
      at.textContent = `started as process ${found.pid}; it appears under Runs when it trains`;
    } catch (error) { at.textContent = error.message; }
  } }, make("label", {}, "Command ", kind), fields, plan, make("div", { class: "bar" }, button, guess), guessed);
  main.append(make("h2", {}, "New run"), note, form, at, started);
  let forms = {}, catalog = { strategies: {}, options: [] }, chips = null, timer = 0, checking = 0, asked = 0, gone = false, trying = false;

  // The options that the fields hold, as the server takes them.
  function given() {
    const options = {};
    for (const field of fields.querySelectorAll("[name]")) {
      if (field.type === "checkbox") { if (field.checked) options[field.name] = true; continue; }
      const lines = field.value.split("\n").map((line) => line.trim()).filter(Boolean);
      if (lines.length) options[field.name] = field.tagName === "TEXTAREA" ? lines : lines[0];
    }
    return options;
  }

  function row(option, value) {
    const id = `option-${option.name}`, attributes = { name: option.name, id, oninput: changed };
    let field;
    if (option.is_flag) { field = make("input", { ...attributes, type: "checkbox" }); field.checked = value === true; }
    else if (option.multiple) {
      field = make("textarea", { ...attributes, placeholder: "one per line", rows: "3" });
      field.value = [value ?? []].flat().join("\n");
    } else field = fieldOf(option, value === undefined ? undefined : String(value), attributes);
    if (option.required) (field.matches("[name]") ? field : field.firstChild).setAttribute("required", "");
    return make("p", {}, make("label", { for: id }, label(option)), field,
      make("small", {}, (option.is_flag && option.default ? "Turns this off: " : "") + helpOf(option)[0]),
      make("small", { class: "wrong", role: "status", "data-of": option.name }));
  }

  // Show the command's form, filled with these options.
  function show(options) {
    const all = forms[kind.value], chip = all.find((option) => option.name in CHIPS);
    chips = strategyChips(chip.name, catalog, CHIPS[chip.name], chip, changed);
    const [basic, more] = [true, false].map((first) => all.filter((option) => option !== chip && option.is_basic === first));
    fields.replaceChildren(chips.box, make("div", { class: "fields" }, ...basic.map((option) => row(option, options[option.name]))),
      make("details", { id: "more", open: more.some((option) => option.name in options) }, make("summary", {}, "More options"),
        make("div", { class: "fields" }, ...more.map((option) => row(option, options[option.name])))));
    chips.set(String(options[chip.name] ?? ""));
  }

  function changed() {
    const words = new URLSearchParams({ command: kind.value });
    for (const [name, value] of Object.entries(given())) for (const one of [value].flat()) words.append(name, one === true ? "1" : one);
    history.replaceState(null, "", `#/new?${words}`);
    if (!trying) guessed.textContent = "";  // it was of other options
    clearTimeout(checking);
    checking = setTimeout(check, PAUSE_MS);
  }

  async function check() {
    const mine = asked += 1;
    let found = { errors: [], plan: "" };
    try { found = await send("/api/check", { command: kind.value, options: given() }); }
    catch (error) {
      if (error.status === 409 && mine === asked && !gone) checking = setTimeout(check, PAUSE_MS);  // of another page
      if (error.status === 409) return;
      found.errors.push({ error: error.message });
    }
    if (mine !== asked || gone) return;  // a later check is under way
    for (const place of fields.querySelectorAll("[data-of]")) {
      const own = found.errors.filter((each) => each.option === place.dataset.of), field = document.getElementById(`option-${place.dataset.of}`);
      place.textContent = own.map((each) => each.error).join("; ");
      if (own.length) field.setAttribute("aria-invalid", "true"); else field.removeAttribute("aria-invalid");
      if (own.length && place.closest("#more")) place.closest("#more").open = true;
    }
    chips.mark(found.errors.filter((each) => each.strategy !== undefined));
    const rest = found.errors.filter((each) => each.strategy === undefined && !fields.querySelector(`[data-of="${each.option}"]`));
    const count = found.errors.length;
    plan.className = count ? "wrong" : "soft";
    plan.textContent = rest.length ? rest.map((each) => each.error).join("; ") : count ? `${count} ${count > 1 ? "options need" : "option needs"} another value.`
      : found.plan && `Start trains ${found.plan}.`;
    button.disabled = count > 0; guess.disabled = trying || count > 0;
  }

  // The form's options that the address holds; "again" names a run whose options to take.
  async function asWanted() {
    const words = new URLSearchParams(location.hash.split("?")[1] ?? ""), run = words.get("again");
    if (run !== null) {
      const found = await get(`/api/runs/${address(run)}/again`);
      note.textContent = `Again, with changes: the options of ${run}. ${found.note}`;
      return found;
    }
    const command = Object.hasOwn(forms, words.get("command")) ? words.get("command") : Object.keys(forms)[0], options = {};
    for (const option of forms[command]) {
      const values = words.getAll(option.name);
      if (values.length) options[option.name] = option.is_flag ? true : option.multiple ? values : values[0];
    }
    return { command, options };
  }

  async function poll() {
    try {
      started.replaceChildren(...(await get("/api/started")).map((one) => make("div", {},
        make("h3", {}, `${one.command}, process ${one.pid}: ${one.status === null ? "running" : `ended with status ${one.status}`}`),
        make("pre", {}, one.output))));
    } catch (error) { at.textContent = error.message; }
    if (!gone) timer = setTimeout(poll, 2 * POLL_MS);
  }

  async function begin() {
    try {
      forms = await get("/api/forms");
      if (!Object.keys(forms).length) {
        form.hidden = true;
        at.textContent = "This page only reads. Start exogym ui without --read-only to start runs here.";
        return;
      }
      catalog = await get("/api/strategies");
      const { command, options } = await asWanted();
      if (gone) return;
      kind.append(...Object.keys(forms).map((name) => make("option", { value: name }, name)));
      kind.value = command;
      show(options);
      if (Object.keys(options).length) changed(); else check();
      poll();
    } catch (error) { form.hidden = true; at.textContent = error.message; }
  }
  at.textContent = "Loading the options.";
  begin().then(() => { if (at.textContent === "Loading the options.") at.textContent = ""; });
  return { update() {}, leave() { gone = true; clearTimeout(timer); clearTimeout(checking); } };
}
