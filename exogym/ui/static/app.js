// Show the page that the address names, and receive the list of runs.

import { fromAddress, store } from "./base.js";
import { comparePage } from "./compare.js";
import { hostsPage } from "./hosts.js";
import { newPage } from "./new.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";

let page = { update() {}, leave() {} };

function open() {
  page.leave();
  const main = document.getElementById("main");
  main.replaceChildren();
  const [, kind, ...rest] = fromAddress().split("/");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${kind ?? ""}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (kind === "run") page = runPage(main, rest.map(decodeURIComponent).join("/"));
  else if (kind === "compare") page = comparePage(main, rest.join("/").split("&").map(decodeURIComponent));
  else if (kind === "hosts") page = hostsPage(main);
  else if (kind === "new") page = newPage(main);
  else page = runsPage(main);
}

function listen() {
  const connection = document.getElementById("connection"), source = new EventSource("/api/events");
  source.addEventListener("runs", (event) => {
    store.list = JSON.parse(event.data); store.known = true;
    connection.textContent = "live";
    page.update();
  });
  source.onerror = () => { connection.textContent = "not connected: start exogym ui again"; };
}

addEventListener("hashchange", open);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", open);  // redraw curves in the new colors
open();
listen();
