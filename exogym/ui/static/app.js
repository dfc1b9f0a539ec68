// Show the page that the address names, and receive the list of runs.

import { fromAddress, make, store } from "./base.js";
import { comparePage } from "./compare.js";
import { hostsPage } from "./hosts.js";
import { newPage } from "./new.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";

const NO_PAGE = { update() {}, leave() {} };
let page = NO_PAGE;

// A "%" that somebody typed stays one.
const decoded = (text) => text.replace(/(?:%[0-9a-f]{2})+/gi, (part) => {
  try { return decodeURIComponent(part); } catch { return part; }
});

function open() {
  page.leave();
  const main = document.getElementById("main");
  main.replaceChildren();
  const [, kind, ...rest] = fromAddress().split("/");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${kind ?? ""}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  page = NO_PAGE;
  try {
    if (kind === "run") page = runPage(main, rest.map(decoded).join("/"));
    else if (kind === "compare") page = comparePage(main, rest.join("/").split("&").map(decoded));
    else if (kind === "hosts") page = hostsPage(main);
    else if (kind === "new") page = newPage(main);
    else page = runsPage(main);
  } catch (error) { main.replaceChildren(make("p", { role: "alert" }, error.message)); }
}

let source = null;

// A browser opens few connections to a server, and this one stays open: a hidden page leaves it to others.
function listen() {
  source?.close(); source = null;
  if (document.hidden) return;
  const connection = document.getElementById("connection");
  source = new EventSource("/api/events");
  source.addEventListener("runs", (event) => {
    store.list = JSON.parse(event.data); store.known = true;
    connection.textContent = "connected"; connection.className = "";
    page.update();
  });
  source.onerror = () => { connection.textContent = "not connected: start exogym ui again"; connection.className = "wrong"; };
}

addEventListener("hashchange", open);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", open);  // redraw curves in the new colors
document.addEventListener("visibilitychange", listen);
open();
listen();
