// A form that starts a comparison or a sweep.

import { get, make, POLL_MS, send } from "./base.js";

export function newPage(main) {
  const at = make("p", { class: "soft", role: "status", id: "answer" }), fields = make("div", { class: "fields" });
  const kind = make("select", { id: "command", onchange: () => show() }), started = make("section");
  const form = make("form", { onsubmit: async (event) => {
    event.preventDefault();
    const options = {};
    for (const field of fields.querySelectorAll("[name]")) {
      if (field.type === "checkbox") { if (field.checked) options[field.name] = true; continue; }
      const lines = field.value.split("\n").map((line) => line.trim()).filter(Boolean);
      if (lines.length) options[field.name] = field.tagName === "TEXTAREA" ? lines : lines[0];
    }
    try {
      const found = await send("/api/start", { command: kind.value, options });
      at.textContent = `started as process ${found.pid}; it appears under Runs when it trains`;
    } catch (error) { at.textContent = error.message; }
  } }, make("label", {}, "Command ", kind), fields, make("button", { type: "submit", id: "start" }, "Start"));
  main.append(make("h2", {}, "New run"), form, at, started);
  let forms = {}, timer = 0;

  function show() {
    fields.replaceChildren(...forms[kind.value].map((option) => {
      const attributes = { name: option.name, id: `option-${option.name}` };
      const field = option.is_flag ? make("input", { ...attributes, type: "checkbox" })
        : option.multiple ? make("textarea", { ...attributes, placeholder: "one per line", rows: "3" })
          : make("input", { ...attributes, type: "text", placeholder: String(option.default ?? "") });
      if (option.required) field.setAttribute("required", "");
      return make("p", {}, make("label", { for: attributes.id }, option.flag.replace(/^--/, "")), field,
        make("small", {}, option.help));
    }));
  }

  async function poll() {
    try {
      started.replaceChildren(...(await get("/api/started")).map((one) => make("div", {},
        make("h3", {}, `${one.command}, process ${one.pid}: ${one.status === null ? "running" : `ended with status ${one.status}`}`),
        make("pre", {}, one.output))));
    } catch (error) { at.textContent = error.message; }
    timer = setTimeout(poll, 2 * POLL_MS);
  }
  get("/api/forms").then((found) => {
    forms = found;
    kind.append(...Object.keys(forms).map((name) => make("option", { value: name }, name)));
    if (!kind.value) { form.hidden = true; at.textContent = "This page only reads. Start exogym ui without --read-only to start runs here."; }
    else { show(); poll(); }
  }, (error) => { at.textContent = error.message; });
  return { update() {}, leave() { clearTimeout(timer); } };
}
