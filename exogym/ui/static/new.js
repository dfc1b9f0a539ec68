// Start a comparison or a sweep by one line, completed and checked while you type. The line stands in the address.

import { address, get, make, POLL_MS, send } from "./base.js";

const PAUSE_MS = 300, MOST_SHOWN = 12;  // from the last key to a check; suggestions
const COMMON = ["ddp", "diloco:H=30", "fedavg:H=10", "sparta", "demo", "powersgd"];
const CHECKING = "Checking the line.";
const OF_STRATEGIES = new Set(["strategies", "strategy"]);
const FIRST = "compare --strategies ddp,diloco:H=30,sparta --nodes 4 --steps 400";

// The words of a line as a shell would split it.
export function words(line) {
  return [...line.matchAll(/(?:[^\s'"]|'[^']*'|"[^"]*")+/g)].map(([word]) => word.replace(/'([^']*)'|"([^"]*)"/g, (_, one, two) => one ?? two));
}
const quoted = (word) => (/^[\w,.:;=/+*-]+$/.test(word) ? word : `'${word.replaceAll("'", '"')}'`);
const flagsOf = (option) => option.flag.split(/[\s,/]+/).filter((flag) => flag.startsWith("-"));

// A line as a command and its options, with the first error in it.
export function parsed(line, forms) {
  const [command, ...rest] = words(line.trim().replace(/^exogym\s+/, "")), options = {};
  if (!Object.hasOwn(forms, command)) return { command, options, error: `${command ? `'${command}'` : "an empty line"} is no command: begin with ${Object.keys(forms).join(" or ")}` };
  for (let k = 0; k < rest.length; k += 1) {
    const [, flag, own] = /^(--?[\w-]+)(?:=(.*))?$/s.exec(rest[k]) ?? [], option = forms[command].find((one) => flag && flagsOf(one).includes(flag));
    if (!option) return { command, options, error: `'${rest[k]}' is no option of ${command}: type -- to see all of them` };
    if (option.is_flag) { options[option.name] = true; continue; }
    const value = own ?? rest[k += 1];
    if (value === undefined) return { command, options, error: `${flag} needs a value` };
    options[option.name] = option.multiple ? [...(options[option.name] ?? []), value] : value;
  }
  return { command, options, error: "" };
}

function written({ command, options }, forms) {
  const of = (name) => forms[command]?.find((option) => option.name === name)?.flag ?? `--${name.replaceAll("_", "-")}`;
  return [command, ...Object.entries(options).flatMap(([name, value]) => (value === true ? [of(name)] : [value].flat().flatMap((one) => [of(name), quoted(String(one))])))].join(" ");
}

// What may stand at the cursor: [text, help] of each, and where the unfinished part begins.
export function suggestions(line, forms, strategies) {
  const before = words(line.replace(/\S*$/, "").replace(/^exogym\s+/, "")), part = /\S*$/.exec(line)[0], at = line.length - part.length;
  const from = (start, all) => ({ start, found: all.filter(([text]) => text.startsWith(line.slice(start)) && text !== line.slice(start)).slice(0, MOST_SHOWN) });
  if (!before.length) return from(at, Object.keys(forms).map((name) => [name, ""]));
  const form = forms[before[0]] ?? [], last = form.find((one) => flagsOf(one).includes(before.at(-1)) && !one.is_flag);
  if (!last) {
    const given = new Set(before);
    return from(at, form.filter((one) => one.multiple || !flagsOf(one).some((flag) => given.has(flag))).map((one) => [flagsOf(one)[0], one.help.split("\n")[0]]));
  }
  if (OF_STRATEGIES.has(last.name)) {
    const text = part.split(",").at(-1), own = text.split(":"), start = line.length - own.at(-1).length;
    if (own.length === 1) return from(start, Object.entries(strategies).map(([name, { title }]) => [name, title]));
    const known = strategies[own[0]]?.options ?? [], [name, value] = own.at(-1).split("=");
    if (value === undefined) return from(start, known.map((one) => [`${one.name}=`, one.help]));
    const one = known.find((each) => each.name === name);
    return from(line.length - value.length, (one?.choices ?? []).map((choice) => [choice, ""]));
  }
  return from(at, last.choices.map((choice) => [choice, ""]));
}

export function newPage(main) {
  const at = make("p", { class: "soft", role: "status", id: "answer" }), note = make("p", { class: "soft", id: "note" });
  const plan = make("p", { id: "plan", role: "status" }), wrong = make("p", { id: "wrong", class: "wrong", role: "status" }), started = make("section");
  const line = make("textarea", { id: "line", rows: "2", spellcheck: false, autocomplete: "off", role: "combobox", "aria-expanded": "false",
    "aria-controls": "suggestions", "aria-label": "command", oninput() { changed(); }, onkeydown: key, onclick: suggest, onblur: close });
  const list = make("ul", { id: "suggestions", role: "listbox", hidden: true }), help = make("p", { class: "soft", id: "help" });
  const button = make("button", { type: "submit", id: "start" }, "Start");
  const given = () => parsed(line.value, forms);
  const guess = make("button", { type: "button", id: "estimate", title: "Trains each strategy for about a second, and prints the time and memory that all runs need.",
    async onclick() {
      const before = line.value, { command, options } = given();
      trying = guess.disabled = true; guessed.textContent = "Trying each strategy for about a second.";
      const found = await send("/api/estimate", { command, options }).catch((error) => ({ text: error.message }));
      guessed.textContent = before === line.value ? found.text : "";  // it may be of another line by now
      trying = false; guess.disabled = button.disabled;
    } }, "Estimate"), guessed = make("pre", { id: "estimated", role: "status" });
  const common = make("div", { class: "bar", role: "group", "aria-label": "Common strategies" }, ...COMMON.map((text) => make("button", {
    type: "button", class: "chip", "data-strategy": text, onclick() { add(text); } }, text)));
  const form = make("form", { onsubmit: async (event) => {
    event.preventDefault();
    if (checked !== line.value) { wanted = line.value; at.textContent = CHECKING; return; }  // it starts if the check of this text is fine
    if (wrong.textContent || starting) return;
    const { command, options } = given(); starting = true;
    try {
      const found = await send("/api/start", { command, options });
      at.textContent = `started as process ${found.pid}; it appears under Runs when it trains`;
    } catch (error) { at.textContent = error.message; } finally { starting = false; }
  } }, make("div", { class: "line" }, make("span", { "aria-hidden": "true" }, "exogym "), line, list), help, common, wrong, plan, make("div", { class: "bar" }, button, guess), guessed);
  main.append(make("h2", {}, "New run"), note, form, at, started);
  let forms = {}, catalog = {}, timer = 0, checking = 0, asked = 0, gone = false, trying = false, starting = false, offered = null, chosen = -1, begun = "", checked = null, wanted = null;  // checked: the text of the last check; wanted: the text to start

  // Write a strategy into the line.
  function add(text) {
    const option = /^\s*(?:exogym\s+)?sweep/.test(line.value) ? "--strategy" : "--strategies", known = new RegExp(`(${option}[= ])(\\S*)`);
    if (!known.test(line.value)) line.value = `${line.value.trimEnd()} ${option} ${text}`.trimStart();
    else line.value = line.value.replace(known, (_, flag, before) => `${flag}${before && option === "--strategies" ? `${before},` : ""}${text}`);
    line.focus(); changed();
  }

  function close() { list.hidden = true; offered = null; chosen = -1; line.setAttribute("aria-expanded", "false"); line.removeAttribute("aria-activedescendant"); }

  function suggest() {
    const end = line.selectionStart;
    if (end !== line.selectionEnd || (end < line.value.length && !/\s/.test(line.value[end]))) { close(); return; }
    offered = suggestions(line.value.slice(0, end), forms, catalog);
    chosen = -1;
    list.replaceChildren(...offered.found.map(([text, said], k) => make("li", { id: `suggestion-${k}`, role: "option", onpointerdown(event) { event.preventDefault(); take(k); } },
      make("code", {}, text), " ", make("small", {}, said))));
    list.hidden = !offered.found.length;
    line.setAttribute("aria-expanded", String(!list.hidden));
  }

  function take(k) {
    const [text] = offered.found[k], end = line.selectionStart, space = text.startsWith("--") ? " " : "";
    line.setRangeText(text + space, offered.start, end, "end");
    changed(); suggest();
  }

  function key(event) {
    if (event.key === "Enter" && (list.hidden || chosen < 0)) { event.preventDefault(); if (!event.repeat) form.requestSubmit(); return; }
    if (list.hidden || !offered) return;
    const last = offered.found.length - 1;
    if (event.key === "ArrowDown") chosen = Math.min(chosen + 1, last);
    else if (event.key === "ArrowUp") chosen = Math.max(chosen - 1, 0);
    else if (event.key === "Tab" || event.key === "Enter") { event.preventDefault(); take(Math.max(chosen, 0)); return; }
    else if (event.key === "Escape") { close(); return; }
    else return;
    event.preventDefault();
    [...list.children].forEach((one, k) => one.setAttribute("aria-selected", String(k === chosen)));
    line.setAttribute("aria-activedescendant", `suggestion-${chosen}`);
  }

  function changed() {
    begun = wanted = null;
    if (!trying) guessed.textContent = "";  // it was of another line
    if (document.activeElement === line) suggest();
    clearTimeout(checking);
    checking = setTimeout(check, PAUSE_MS);
  }

  async function check() {
    if (!Object.keys(forms).length || !Object.keys(catalog).length) return;
    if (begun === null) history.replaceState(null, "", `#/new?${new URLSearchParams({ line: line.value })}`);
    const mine = asked += 1, text = line.value, { command, options, error } = given();
    let found = { error, plan: "" };
    if (!error) {
      try { found = await send("/api/check", { command, options }); }
      catch (failed) {
        if (failed.status === 409 && mine === asked && !gone) checking = setTimeout(check, PAUSE_MS);  // of another page
        if (failed.status === 409) return;
        found = { error: failed.message, plan: "" };
      }
    }
    if (mine !== asked || gone) return;  // a later check is under way
    if (at.textContent === CHECKING) at.textContent = "";
    wrong.textContent = found.error; checked = text;
    line.setAttribute("aria-invalid", String(Boolean(found.error)));
    plan.textContent = found.plan && `Start trains ${found.plan}.`;
    button.disabled = Boolean(found.error); guess.disabled = trying || button.disabled;
    if (wanted === text && text === line.value) { wanted = null; form.requestSubmit(); }
  }

  // The line that the address holds; "again" names a run whose options to take.
  async function asWanted() {
    const given = new URLSearchParams(location.hash.split("?")[1] ?? ""), run = given.get("again");
    if (run !== null) {
      const found = await get(`/api/runs/${address(run)}/again`);
      note.textContent = `Again, with changes: the options of ${run}. ${found.note}`;
      return written(found, forms);
    }
    return line.value;
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
    const before = line.value = new URLSearchParams(location.hash.split("?")[1]).get("line") ?? FIRST;  // others may type already
    button.disabled = guess.disabled = true; form.hidden = location.hash.includes("again=");
    try {
      forms = await get("/api/forms");
      if (!Object.keys(forms).length) {
        form.hidden = true;
        at.textContent = "This page only reads. Start exogym ui without --read-only to start runs here.";
        return;
      }
      catalog = await get("/api/strategies");
      if (line.value === before) begun = line.value = await asWanted();
      if (gone) return;
      form.hidden = false; at.textContent = CHECKING;
      help.textContent = `Options: ${[...new Set(Object.values(forms).flat().filter((one) => one.is_basic).map((one) => flagsOf(one)[0]))].join(" ")} ... Type -- for all of them; Tab completes.`;
      check();
      poll();
    } catch (error) { at.textContent = error.message; }
  }
  at.textContent = "Loading the options.";
  begin();
  return { update() {}, leave() { gone = true; clearTimeout(timer); clearTimeout(checking); } };
}
