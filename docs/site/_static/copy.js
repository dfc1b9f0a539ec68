// A button on each block of code that copies it; of a session only what was typed.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return;
  for (const block of document.querySelectorAll("article div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      let text = block.querySelector("pre").textContent;
      if (/^>>> /m.test(text)) {
        text = text.split("\n").filter((line) => /^(>>>|\.\.\.)/.test(line)).map((line) => line.slice(4)).join("\n") + "\n";
      }
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.appendChild(button);
  }
});
