// Keys that work wherever the focus is, but in what is written in and under a dialog.

import { byID } from "./element.js";

const storage = "inferrail.keys";

// watchKeys calls what belongs to a key. Who speaks to the computer, or types without
// looking, can switch single letters off.
export function watchKeys(keys) {
  const choice = byID("keys-on");
  try {
    choice.checked = localStorage.getItem(storage) !== "off";
  } catch {
    // They are on.
  }
  choice.addEventListener("change", () => {
    try {
      if (choice.checked) localStorage.removeItem(storage);
      else localStorage.setItem(storage, "off");
    } catch {
      // It lasts until the page is closed, then.
    }
  });
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.isComposing || e.defaultPrevented || !choice.checked) return;
    if (e.target.closest("input, textarea, select") || document.querySelector("dialog[open]")) return;
    const act = Object.hasOwn(keys, e.key) ? keys[e.key] : null;
    if (!act) return;
    e.preventDefault();
    act();
  });
}
