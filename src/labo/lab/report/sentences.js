// The sentence browser: a filter, a list to move through with the arrow keys, and the output of every
// run for the chosen sentence. The background of a token shows its probability.
"use strict";
(() => {
  for (const root of document.querySelectorAll(".browser")) {
    const data = JSON.parse(document.getElementById(`${root.id}-data`).textContent);
    const filter = root.querySelector("input");
    const list = root.querySelector('[role="listbox"]');
    const view = root.querySelector(".sentence dl");
    const found = root.querySelector(".found");
    const texts = data.sentences.map((sentence) =>
      [sentence.source, sentence.reference, ...sentence.outputs.map((o) => o.text)].join("\n").toLowerCase());

    const options = data.sentences.map((sentence, i) => {
      const option = document.createElement("li");
      option.role = "option";
      option.id = `${root.id}-${i}`;
      option.textContent = option.title = sentence.source;
      option.addEventListener("click", () => choose(option));
      return option;
    });
    let shown = [], chosen = null;

    function entry(term, colour, ...content) {
      const name = document.createElement("dt"), text = document.createElement("dd");
      if (colour) {
        const key = document.createElement("span");
        key.className = `key ${colour}`;
        name.append(key);
      }
      name.append(term);
      text.append(...content);
      view.append(name, text);
      return text;
    }

    // The space before a word has no background.
    function token([text, p]) {
      const span = document.createElement("span");
      span.className = "token";
      span.tabIndex = -1;
      span.dataset.p = p.toFixed(3);
      span.style.setProperty("--p", p);
      span.setAttribute("role", "listitem");
      span.setAttribute("aria-label", `${text.trim()}: probability ${p.toFixed(3)}`);
      span.textContent = text.trim();
      return [text.match(/^\s*/)[0], span, text.trim() ? text.match(/\s*$/)[0] : ""];
    }

    function choose(option) {
      if (chosen) chosen.setAttribute("aria-selected", "false");
      chosen = option;
      view.replaceChildren();
      if (!option) {
        list.removeAttribute("aria-activedescendant");
        return;
      }
      option.setAttribute("aria-selected", "true");
      list.setAttribute("aria-activedescendant", option.id);
      const sentence = data.sentences[options.indexOf(option)];
      entry("source", "", sentence.source);
      entry("reference", "", sentence.reference);
      for (const output of sentence.outputs) {
        const run = data.runs[output.run];
        const line = entry(run.name, run.colour, ...output.tokens.flatMap(token));
        line.className = `output ${run.colour}`;
        line.setAttribute("role", "list");
        if (line.firstElementChild) line.firstElementChild.tabIndex = 0;
      }
    }

    // scrollIntoView would also scroll the page.
    function reveal(option) {
      const above = option.offsetTop, below = above + option.offsetHeight;
      if (above < list.scrollTop) list.scrollTop = above;
      else if (below > list.scrollTop + list.clientHeight) list.scrollTop = below - list.clientHeight;
    }

    function search() {
      const wanted = filter.value.trim().toLowerCase();
      shown = options.filter((_, i) => texts[i].includes(wanted));
      list.replaceChildren(...shown);
      found.textContent = `${shown.length} of ${options.length} sentences`;
      choose(shown.includes(chosen) ? chosen : shown[0] || null);
    }

    function walk(step) {
      const next = shown[Math.min(Math.max(shown.indexOf(chosen) + step, 0), shown.length - 1)];
      if (next) {
        choose(next);
        reveal(next);
      }
    }

    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, End: Infinity, Home: -Infinity };
    list.addEventListener("keydown", (event) => {
      if (event.key in steps) { walk(steps[event.key]); event.preventDefault(); }
    });
    filter.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        walk(steps[event.key]);
        event.preventDefault();
      }
    });
    // Left and right move between tokens.
    view.addEventListener("keydown", (event) => {
      const side = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
      const neighbour = side && event.target[side];
      if (neighbour) {
        event.target.tabIndex = -1;
        neighbour.tabIndex = 0;
        neighbour.focus();
        event.preventDefault();
      }
    });
    filter.addEventListener("input", search);
    search();
  }
})();
