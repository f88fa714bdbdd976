// The label explorer: the labels of one sample for the values of the sliders. The formulas are those
// of labo.smoothing.
"use strict";
(() => {
  const root = document.getElementById("explorer");
  if (!root) return;
  const { examples } = JSON.parse(document.getElementById("explorer-data").textContent);
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const ROWS = 10;

  // ---------------------------------------------------------------- the mathematics
  // A sample is a list of [logit, number of classes with it]. Of a large vocabulary the most probable
  // classes are listed one by one, the others in groups of nearly equal logits.

  function softmax(groups, tau) {
    const top = Math.max(...groups.map(([logit]) => logit));
    const weights = groups.map(([logit]) => Math.exp((logit - top) / tau));
    const total = groups.reduce((sum, [, count], i) => sum + count * weights[i], 0);
    return weights.map((weight) => weight / total);
  }

  function entropy(groups, p) {
    return -groups.reduce((sum, [, count], i) => sum + (p[i] > 0 ? count * p[i] * Math.log(p[i]) : 0), 0);
  }

  const adaptiveAlpha = (h, rho, K) => 1 - (rho * h) / (K > 1 ? Math.log(K) : 1);

  const logSigmoid = (x) => (x >= 0 ? -Math.log1p(Math.exp(-x)) : x - Math.log1p(Math.exp(x)));

  // The p with p = (1 - alpha) + alpha P*(p), the rest of the mass spread evenly; by bisection in the
  // log-odds.
  function stationaryConfidence(K, tau, alpha, rho) {
    if (K === 1 || tau <= 1 || alpha === 0) return 1;
    const base = Math.log(K - 1);
    const strength = (odds) => {
      if (alpha !== null) return alpha;
      const p = logSigmoid(odds), rest = logSigmoid(-odds);
      return adaptiveAlpha(-Math.exp(p) * p - Math.exp(rest) * (rest - base), rho, K);
    };
    const isBelow = (odds) => {
      const a = strength(odds);
      if (a === 0) return true;
      const star = (odds + base) / tau - base;
      return logSigmoid(-odds) - Math.log(a) - logSigmoid(-star) > 0;
    };
    let low = -base, high = 700;
    for (let i = 0; i < 200; i++) {
      const middle = (low + high) / 2;
      if (isBelow(middle)) low = middle; else high = middle;
    }
    return Math.exp(logSigmoid((low + high) / 2));
  }

  function labels(example, { tau, rho, alpha, alphaLs }) {
    const groups = [...example.logits.map((logit) => [logit, 1]), ...example.tail];
    const present = groups.reduce((sum, [, count]) => sum + count, 0);
    const p = softmax(groups, 1), optimal = softmax(groups, tau), h = entropy(groups, p);
    const strength = alpha === null ? adaptiveAlpha(h, rho, example.K) : alpha;
    const rows = example.classes.map((name, i) => {
      const hot = i === example.target ? 1 : 0;
      return {
        name, target: hot === 1, p: p[i], onehot: hot,
        ls: (1 - alphaLs) * hot + alphaLs / present,
        labo: (1 - strength) * hot + strength * optimal[i],
      };
    });
    return { rows, alpha: strength, entropy: h };
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
    part("rest").textContent = example.K > rows.length
      ? `The other ${example.K - rows.length} classes have the remaining mass.` : "";
    for (const input of Object.values(sliders)) {
      root.querySelector(`output[for="${input.id}"]`).textContent = Number(input.value).toFixed(2);
    }
    sliders.rho.closest(".slider").classList.toggle("off", set.fixed);
    sliders.alpha.closest(".slider").classList.toggle("off", !set.fixed);
    const own = result.rows[example.target];
    part("alpha").textContent = show(result.alpha);
    part("label").textContent = show(own.labo);
    part("confidence").textContent = show(stationaryConfidence(example.K, set.tau, set.alpha, set.rho));
    part("entropy").textContent = show(result.entropy);
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
