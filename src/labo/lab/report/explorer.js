// The label explorer: the labels of one sample for the values of the sliders. The numbers are those of
// labo.smoothing, computed by the analysis; here they are looked up and mixed.
"use strict";
(() => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const { examples, taus, strengths, stationary } = JSON.parse(
    document.getElementById("explorer-data").textContent);
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const ROWS = 10;

  // ---------------------------------------------------------------- the numbers

  const mixed = (start, end, share) => (1 - share) * start + share * end;
  const position = (values, wanted) => values.findIndex((value) => Math.abs(value - wanted) < 1e-6);

  function labels(example, { tau, rho, alpha, alphaLs }) {
    const optimal = example.optimal[position(taus, tau)];
    const strength = alpha === null ? mixed(...example.alpha, rho) : alpha;
    const rows = example.names.map((name, i) => ({
      name, target: i === example.target, p: example.p[i], onehot: example.onehot[i],
      ls: mixed(example.onehot[i], example.uniform[i], alphaLs),
      labo: mixed(example.onehot[i], optimal[i], strength),
    }));
    return { rows, alpha: strength };
  }

  function confidence(example, { tau, rho, alpha }) {
    const table = stationary[example.classes];
    const row = (alpha === null ? table.adaptive : table.fixed)[position(taus, tau)];
    return row[position(strengths, alpha === null ? rho : alpha)];
  }

  // ---------------------------------------------------------------- the page

  const show = (value) => value.toFixed(3);
  const sliders = Object.fromEntries(
    [...root.querySelectorAll("input[type=range]")].map((input) => [input.name, input]));

  function settings() {
    const fixed = root.querySelector("input[name=mode]:checked").value === "fixed";
    return {
      tau: Number(sliders.tau.value), rho: Number(sliders.rho.value), fixed,
      alpha: fixed ? Number(sliders.alpha.value) : null, alphaLs: Number(sliders.ls.value),
    };
  }

  function row(entry) {
    const line = document.createElement("tr");
    line.className = entry.target ? "target" : "";
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = name.title = entry.name;
    line.append(name);
    for (const column of ["p", "onehot", "ls", "labo"]) {
      const cell = document.createElement("td");
      cell.className = { p: "m3", onehot: "m0", ls: "m1", labo: "m2" }[column];
      cell.dataset.column = column;
      cell.style.setProperty("--v", entry[column]);
      cell.textContent = show(entry[column]);
      line.append(cell);
    }
    return line;
  }

  function draw() {
    const example = examples[Number(part("example").value)];
    const set = settings();
    const result = labels(example, set);
    // The most probable classes; the target is always one of them.
    const rows = result.rows.slice(0, ROWS);
    if (example.target >= ROWS) rows[ROWS - 1] = result.rows[example.target];
    part("rows").replaceChildren(...rows.map(row));
    part("rest").textContent = example.classes > rows.length
      ? `The other ${example.classes - rows.length} classes have the remaining mass.` : "";
    for (const input of Object.values(sliders)) {
      root.querySelector(`output[for="${input.id}"]`).textContent = Number(input.value).toFixed(2);
    }
    sliders.rho.closest(".slider").classList.toggle("off", set.fixed);
    sliders.alpha.closest(".slider").classList.toggle("off", !set.fixed);
    const own = result.rows[example.target];
    part("alpha").textContent = show(result.alpha);
    part("label").textContent = show(own.labo);
    part("confidence").textContent = show(confidence(example, set));
    part("entropy").textContent = show(example.entropy);
  }

  function choose() {
    const example = examples[Number(part("example").value)];
    const image = part("image");
    image.hidden = !example.image;
    if (example.image) image.src = example.image; else image.removeAttribute("src");
    image.alt = example.image ? `The image: ${example.title}` : "";
    part("context").textContent = example.context || "";
    draw();
  }

  root.addEventListener("input", (event) => (event.target === part("example") ? choose() : draw()));
  choose();
})();
