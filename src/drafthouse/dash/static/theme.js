// Before the first paint: the theme that was chosen, if one was. Without a choice the system's own applies.
"use strict";
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("dash-theme");
  } catch {
    // storage may be forbidden; then the system's theme it is
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
