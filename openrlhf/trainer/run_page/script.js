// Curves and samples of runs of train_ppo.
(() => {
  const { byId, element, drawing, number, count, plural, pair, niceStep, data } = Page;
  const COLORS = 6, KNOWN = 40; // colours of groups; points that get a dot each
  const alone = data.groups.reduce((runs, group) => runs + group.runs, 0) === 1; // several have no room for sentences
  const hidden = new Set(); // groups that the legend has switched off

  // ---- curves -----------------------------------------------------------------------------------------------------
  const steps = data.panels.flatMap((panel) => panel.curves.flatMap((curve) => curve.steps));
  const first = steps.reduce((a, b) => Math.min(a, b), Infinity), last = steps.reduce((a, b) => Math.max(a, b), -Infinity);
  const shown = { step: last, sample: 0 }, drawnPanels = [];
  const colour = (group) => `run-${group % COLORS}`, dashed = (group) => group >= COLORS ? " dashed" : "";
  function short(value) { // four digits
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replaceAll("-", "−");
    return number(value, Math.max(0, 3 - Math.max(0, Math.floor(Math.log10(size || 1)))));
  }
  function thinned(values, columns) { // places to draw: all, or the lowest and highest of each column
    const n = values.length;
    if (n <= 2 * columns) return values.map((_, i) => i);
    const places = new Set([0, n - 1]);
    for (let c = 0; c < columns; c++) {
      const from = Math.floor(c * n / columns), to = Math.floor((c + 1) * n / columns);
      let low = from, high = from;
      for (let i = from; i < to; i++) {
        if (values[i] === null) { places.add(i); continue; }
        if (values[low] === null || values[i] < values[low]) low = i;
        if (values[high] === null || values[i] > values[high]) high = i;
      }
      places.add(low).add(high);
    }
    return [...places].sort((a, b) => a - b);
  }
  function pieces(curve, places) { // stretches without a gap
    const found = [[]];
    for (const i of places) if (curve.mean[i] === null) found.push([]); else found[found.length - 1].push(i);
    return found.filter((piece) => piece.length);
  }
  function drawPanel(panel, place, width) {
    const curves = panel.curves.filter((curve) => !hidden.has(curve.group)), height = 168, left = 52, right = 10, top = 14, bottom = 20;
    const values = curves.flatMap((curve) => [...(curve.low || curve.mean), ...(curve.high || curve.mean)]).filter((value) => value !== null);
    const box = drawing("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, height, role: "group" });
    if (!values.length) return box;
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const pad = (high - low) * .06 || Math.abs(high) * .05 || .05;
    low -= pad; high += pad;
    const x = (step) => left + (last === first ? .5 : (step - first) / (last - first)) * (width - left - right);
    const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
    box.setAttribute("aria-label", `${panel.title}. ` + curves.map((curve) => {
      const known = curve.mean.filter((value) => value !== null);
      return `${data.groups[curve.group].name}: ${known.length ? `starts at ${short(known[0])}, ends at ${short(known[known.length - 1])}` : "no numbers"}`;
    }).join("; "));
    const tickStep = niceStep(high - low), digits = Math.max(0, -Math.floor(Math.log10(tickStep) + 1e-9));
    for (let k = Math.ceil(low / tickStep); k * tickStep <= high; k++) {
      const tick = k * tickStep;
      box.append(drawing("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
        drawing("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, digits > 4 ? short(tick) : number(tick, digits)));
    }
    const across = Math.max(1, niceStep(Math.max(1, last - first)));
    for (let tick = Math.ceil(first / across) * across; tick <= last; tick += across) box.append(drawing("text", { x: x(tick), y: height - 4, "text-anchor": tick === last ? "end" : "middle" }, count(tick)));
    for (const curve of curves) {
      const line = drawing("g", { class: colour(curve.group) });
      for (const piece of pieces(curve, thinned(curve.mean, Math.round(width - left - right)))) {
        const path = (numbers, order) => order.map((i) => `${x(curve.steps[i]).toFixed(1)} ${y(numbers[i]).toFixed(1)}`).join("L");
        if (curve.low) line.append(drawing("path", { class: "band", d: `M${path(curve.high, piece)}L${path(curve.low, piece.slice().reverse())}Z` }));
        line.append(drawing("path", { class: `line${dashed(curve.group)}`, d: `M${path(curve.mean, piece)}` }));
        if (curve.steps.length <= KNOWN || piece.length === 1) for (const i of piece) line.append(drawing("circle", { class: "dot", cx: x(curve.steps[i]).toFixed(1), cy: y(curve.mean[i]).toFixed(1), r: 2 }));
      }
      box.append(line);
    }
    data.warnings.forEach((warning, i) => {
      if (warning.panel !== place || hidden.has(warning.group)) return;
      const link = drawing("a", { href: `#warning-${i + 1}`, "aria-label": `warning ${i + 1}, rollout ${warning.step}` });
      link.append(drawing("title", {}, `${warning.sentence} To try: ${warning.advice}.`), drawing("text", { x: x(warning.step), y: 11, "text-anchor": x(warning.step) > width - 30 ? "end" : "middle" }, i + 1));
      box.append(drawing("line", { class: "mark", x1: x(warning.step), x2: x(warning.step), y1: top, y2: height - bottom }), link);
    });
    const cursor = drawing("line", { class: "cursor", y1: top, y2: height - bottom });
    box.append(cursor);
    box.moveCursor = (step) => { cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); };
    box.stepAt = (event) => {
      const spot = box.getBoundingClientRect(), share = ((event.clientX - spot.left) * width / spot.width - left) / (width - left - right);
      return Math.round(first + Math.max(0, Math.min(1, share)) * (last - first));
    };
    return box;
  }
  function placeBefore(steps, step) { // of the last step that is not behind `step`; -1: none
    let low = 0, high = steps.length;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle + 1; else high = middle; }
    return low - 1;
  }
  function readOut(panel, box) {
    box.textContent = "";
    for (const curve of panel.curves) {
      if (hidden.has(curve.group)) continue;
      const i = placeBefore(curve.steps, shown.step), told = element("span", colour(curve.group));
      if (i < 0) told.append("–");
      else {
        told.append(short(curve.mean[i]));
        if (curve.low && curve.low[i] !== curve.high[i]) told.append(` (${short(curve.low[i])} to ${short(curve.high[i])})`);
        if (curve.steps[i] !== shown.step) told.append(` at ${count(curve.steps[i])}`);
      }
      box.append(told);
    }
  }
  function moveTo(step) {
    shown.step = step;
    byId("step").value = step;
    byId("step").setAttribute("aria-valuetext", `rollout ${step}`);
    byId("at").textContent = count(step);
    for (const one of drawnPanels) {
      if (one.curve.moveCursor) one.curve.moveCursor(step);
      readOut(one.panel, one.readout);
    }
  }
  function redraw() {
    for (const one of drawnPanels) {
      const curve = drawPanel(one.panel, one.place, Math.max(260, one.figure.clientWidth || 320));
      if (curve.stepAt) for (const kind of ["pointermove", "pointerdown"]) curve.addEventListener(kind, (event) => moveTo(curve.stepAt(event)));
      one.curve.replaceWith(curve);
      one.curve = curve;
    }
    moveTo(shown.step);
  }
  function addPanel(panel, place) {
    const curve = drawing("svg", {}), readout = element("p", "readout"), title = element("h3", "", panel.title, " ", element("small", "", panel.unit));
    const figure = element("figure", "", title, readout, curve), marks = element("ul", "marks");
    data.warnings.forEach((warning, i) => {
      if (warning.panel !== place) return;
      const text = alone ? `: ${warning.sentence} To try: ${warning.advice}.` : `, ${warning.run}: ${warning.name.replaceAll("_", " ")}`;
      marks.append(element("li", "", element("b", "", `${i + 1} at rollout ${count(warning.step)}`), text));
    });
    if (marks.children.length) figure.append(marks);
    byId(panel.listed ? "panels" : "more-panels").append(figure);
    drawnPanels.push({ panel, place, figure, curve, readout });
  }
  function unfold() { // the warning that a mark leads to
    const target = /^#warning-\d+$/.test(location.hash) && document.querySelector(location.hash), fold = target && target.closest("details");
    if (fold) fold.open = true;
    if (target) target.scrollIntoView();
  }
  function startCurves() {
    if (!data.panels.length) return;
    byId("drawn").hidden = false;
    data.panels.forEach(addPanel);
    const others = byId("more-panels").children.length;
    byId("more").hidden = !others;
    byId("more-summary").textContent = `${plural(others, "further metric")}`;
    byId("more").addEventListener("toggle", redraw);
    byId("range-note").hidden = !data.groups.some((group) => group.runs > 1);
    byId("legend").hidden = data.groups.length < 2;
    data.groups.forEach((group, i) => {
      const box = Object.assign(element("input"), { type: "checkbox", checked: true });
      box.addEventListener("change", () => { if (box.checked) hidden.delete(i); else hidden.add(i); redraw(); });
      byId("legend").append(element("label", "", box, element("span", `swatch ${colour(i)}${dashed(i)}`), group.name));
    });
    Object.assign(byId("step"), { min: first, max: last });
    byId("step").addEventListener("input", () => moveTo(Number(byId("step").value)));
    addEventListener("resize", redraw);
    addEventListener("hashchange", unfold);
    redraw();
  }

  // ---- samples ----------------------------------------------------------------------------------------------------
  const options = (select, words) => select.replaceChildren(...words.map((text, i) => Object.assign(element("option", "", text), { value: i })));
  const samplesOf = () => data.samples[Number(byId("pick-run").value)];
  function fillRun() {
    const samples = samplesOf(), place = Math.min(shown.sample, samples.prompts.length - 1);
    options(byId("pick-prompt"), samples.prompts.map((one, i) => `${i + 1}. ${one.prompt.trim().slice(0, 60)}`));
    byId("samples-note").textContent = "The same held-out prompts at every evaluation"
      + (samples.shown < samples.evaluations ? `; ${count(samples.shown)} of ${plural(samples.evaluations, "evaluation")} are shown.` : `, ${plural(samples.evaluations, "evaluation")}.`);
    select(place);
  }
  function select(place) {
    const { prompts } = samplesOf();
    if (place < 0 || place >= prompts.length) return;
    const one = prompts[place];
    shown.sample = place;
    byId("pick-prompt").value = place;
    byId("position").textContent = `${count(place + 1)} of ${count(prompts.length)}`;
    byId("previous").disabled = place === 0;
    byId("next").disabled = place === prompts.length - 1;
    byId("prompt").textContent = one.prompt;
    byId("facts").replaceChildren(...(one.label === null ? [] : [pair("label", one.label)]));
    byId("responses").replaceChildren(...one.responses.map((response) => {
      const told = element("div", "told", element("b", "", `Rollout ${count(response.step)}`), ` · reward ${response.reward === null ? "none" : short(response.reward)}`);
      if (response.gold_reward !== null) told.append(` · gold ${short(response.gold_reward)}`);
      const text = element("pre", "", response.text || "(empty)");
      text.dir = "auto";
      if (response.letters_left) text.append(element("i", "", ` … ${plural(response.letters_left, "more letter")}`));
      return element("li", "", told, text);
    }));
  }
  function startSamples() {
    if (!data.samples.length) return;
    byId("sampled").hidden = false;
    options(byId("pick-run"), data.samples.map((one) => one.run));
    byId("run-label").hidden = data.samples.length < 2;
    byId("pick-run").addEventListener("change", fillRun);
    byId("pick-prompt").addEventListener("change", () => select(Number(byId("pick-prompt").value)));
    byId("previous").addEventListener("click", () => select(shown.sample - 1));
    byId("next").addEventListener("click", () => select(shown.sample + 1));
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, .strip, .scroll")) return;
      const move = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 }[event.key];
      if (move) { event.preventDefault(); select(shown.sample + move); }
    });
    fillRun();
  }

  startCurves();
  startSamples();
})();
