// Strategies as chips: a click adds one, and its options become fields. One text holds them all, as on the command line.

import { make } from "./base.js";

const parts = (text) => text.split(":").map((part) => part.trim());
export const split = (text) => text.split(",").map((one) => one.trim()).filter(Boolean);

// A strategy's text as its name and options.
function read(text) {
  const [name, ...given] = parts(text), options = new Map();
  for (const part of given) {
    const at = part.indexOf("=");
    if (at > 0) options.set(part.slice(0, at), part.slice(at + 1)); else options.set(part, "");
  }
  return { name: name.toLowerCase(), options };
}
const write = ({ name, options }) => [name, ...[...options].map(([key, value]) => (value === "" ? key : `${key}=${value}`))].join(":");

// A description without its default and its quotes, and the default.
export function helpOf(option) {
  const [, text, usual] = /^(.*?)(?: \[default: (.*)\])?$/s.exec(option.help);
  const known = option.default === null || option.default === "" ? usual : String(option.default);
  return [text.replaceAll("`", ""), known ? `default: ${known}` : "not set"];
}

// The field of an option: a list where there are choices, otherwise text. `option`: kind, choices, is_open, default.
export function fieldOf(option, value, attributes) {
  const [, usual] = helpOf(option);
  const choices = option.kind === "bool" ? ["true", "false"] : option.choices;
  if (choices.length && !option.is_open) {
    const { oninput: onchange, ...others } = attributes, field = make("select", { ...others, onchange }, make("option", { value: "" }, usual));
    for (const choice of value && !choices.includes(value) ? [...choices, value] : choices) {
      field.append(make("option", { value: choice }, choice));
    }
    field.value = value ?? "";
    return field;
  }
  const field = make("input", { type: "text", placeholder: usual, autocomplete: "off", ...attributes,
    ...(option.kind === "int" ? { inputmode: "numeric" } : option.kind === "float" ? { inputmode: "decimal" } : {}) });
  field.value = value ?? "";
  if (!choices.length) return field;
  const list = make("datalist", { id: `${attributes.id}-choices` }, ...choices.map((choice) => make("option", { value: choice })));
  field.setAttribute("list", list.id);
  return make("span", { class: "field" }, field, list);
}

// The chips, the cards of the chosen strategies, and their text. most: 1 or Infinity; changed: called after each change.
export function strategyChips(name, { strategies, options }, most, option, changed) {
  const text = make("input", { type: "text", name, id: `option-${name}`, placeholder: String(option.default ?? ""), autocomplete: "off",
    oninput() { chosen = split(text.value).map(read); cards(); changed(); } });
  const chips = make("div", { class: "chips", role: "group", "aria-label": "Add a strategy" }), box = make("div", { class: "cards" });
  let chosen = [], opened = -1;

  for (const [key, about] of Object.entries(strategies)) {
    chips.append(make("button", { type: "button", class: "chip", "data-strategy": key,
      title: [about.title, about.equation, about.paper].filter(Boolean).join("\n"), onclick() {
        if (most === 1) chosen = [];
        chosen.push({ name: key, options: new Map() });
        opened = chosen.length - 1;
        take();
      } }, key));
  }

  function take() { text.value = chosen.map(write).join(","); cards(); changed(); }

  function optionField(one, known, number) {
    const id = `strategy-${number}-${known.name}`;
    const field = fieldOf(known, one.options.get(known.name), { id, "data-option": known.name, oninput(event) {
      const value = event.target.value.replace(/[,:=\s]/g, "");  // these separate options and strategies
      if (value === "") one.options.delete(known.name); else one.options.set(known.name, value);
      text.value = chosen.map(write).join(",");
      const card = event.target.closest(".card");
      card.dataset.text = write(one);
      card.querySelector("summary").textContent = write(one);
      changed();
    } });
    return make("p", {}, make("label", { for: id }, known.name), field, make("small", {}, helpOf(known)[0]), make("small", { class: "wrong", role: "status" }));
  }

  function card(one, number) {
    const about = strategies[one.name], all = (about?.options ?? []).map((k) => options[k]);
    const inside = [make("p", { class: "soft" }, about ? `${about.title}${about.paper ? `, ${about.paper}` : ""}` : "")];
    inside.push(make("div", { class: "fields" }, ...all.filter((each) => !each.of_all).map((each) => optionField(one, each, number))));
    const further = all.filter((each) => each.of_all);
    if (further.length) {
      inside.push(make("details", { open: further.some((each) => one.options.has(each.name)) }, make("summary", {}, `More options of ${one.name}`),
        make("div", { class: "fields" }, ...further.map((each) => optionField(one, each, number)))));
    }
    return make("div", { class: "card", "data-text": write(one) },
      make("details", { open: number === opened, ontoggle(event) {
        if (event.target.open) opened = number; else if (opened === number) opened = -1;
      } }, make("summary", {}, write(one)), ...inside),
      make("button", { type: "button", class: "drop", "aria-label": `Remove ${write(one)}`, onclick() {
        chosen.splice(number, 1); opened = -1; take();
      } }, "Remove"),
      make("p", { class: "wrong", role: "status" }));
  }

  function cards() {
    box.replaceChildren(...chosen.map(card));
    for (const chip of chips.children) chip.classList.toggle("chosen", chosen.some((one) => one.name === chip.dataset.strategy));
  }

  return {
    box: make("fieldset", { class: "strategies" }, make("legend", {}, most === 1 ? "Strategy" : "Strategies"), chips, box,
      make("p", { class: "whole" }, make("label", { for: text.id }, "As text "), text, make("small", { class: "wrong", role: "status", "data-of": name }))),
    text,
    set(value) { text.value = value; chosen = split(value).map(read); cards(); },
    // Show each error at its strategy, and mark the option that it names.
    mark(errors) {
      for (const each of box.querySelectorAll(".wrong")) each.textContent = "";
      for (const each of box.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
      for (const { strategy, error } of errors) {
        for (const place of box.querySelectorAll(".card")) {
          if (place.dataset.text !== strategy) continue;
          const field = [...place.querySelectorAll("[data-option]")].find((each) => new RegExp(`(^|[^\\w'])${each.dataset.option}=`).test(error.replace(`'${strategy}'`, "")));
          field?.setAttribute("aria-invalid", "true");
          const at = field?.closest("details[open]") ? field.closest("p").querySelector(".wrong") : place.lastElementChild;
          at.textContent = error;
        }
      }
    },
  };
}
