// The button that switches between the light and the dark theme, and the method that is brought
// forward in all figures. The default theme is that of the system.
"use strict";
(() => {
  const button = document.getElementById("theme");
  const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  button.hidden = false;
  name();

  // Pointing at a mark or at a legend entry, or moving to an entry with Tab, brings the marks of its
  // method forward. A click on an entry keeps them there.
  const marks = [...document.querySelectorAll("[data-series]")];
  let kept = null, shown = null;
  function show(series) {
    if (series === shown) return;
    shown = series;
    document.body.classList.toggle("lit", series !== null);
    for (const mark of marks) mark.classList.toggle("on", mark.dataset.series === series);
  }
  const seriesOf = (target) => target.closest?.("[data-series]")?.dataset.series ?? kept;
  document.addEventListener("pointerover", (event) => show(seriesOf(event.target)));
  document.addEventListener("pointerleave", () => show(kept));
  document.addEventListener("focusin", (event) => show(seriesOf(event.target)));
  document.addEventListener("focusout", () => show(kept));
  const entries = marks.filter((mark) => mark.matches("button"));
  for (const entry of entries) {
    entry.addEventListener("click", () => {
      kept = kept === entry.dataset.series ? null : entry.dataset.series;
      for (const other of entries) other.setAttribute("aria-pressed", String(other.dataset.series === kept));
      show(kept);
    });
  }
})();
