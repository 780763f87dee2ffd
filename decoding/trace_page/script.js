"use strict";
// The browser of search trees.
(() => {
  const { byId, element, drawing, number, count, pair, data } = Page;
  const LIST_CHUNK = 80;
  const CHOSEN = ["kept", "finished", "cut"];
  const FATES = {
    kept: "goes on", finished: "finished", cut: "cut off by the limit of tokens", dropped: "dropped: others scored better",
    rejected: "rejected: guidance below the minimum",
  };
  const NAMES = {
    score: "score of the beam", step_score: "score of the step", logprob: "log-probability a token", guidance: "guidance",
    goal: "goal similarity", reward: "sigmoid of the reward", self_evaluation: "self-evaluation", random: "random number",
  };
  const SHORT = { score: "score", logprob: "log-prob", goal: "similarity", reward: "reward", self_evaluation: "self-eval", random: "random" };
  const ENDS = { finished: "finished", length: "cut off by the limit of tokens", goal: "stopped below the threshold", decided: "stopped: the vote was decided" };
  const items = data.searches, shown = { list: [], place: -1, picked: null };

  // ---- small helpers ----------------------------------------------------------------------------------------------
  const runOf = (item) => `${item.method}, seed ${item.seed}`;
  const nameOf = (item) => `${item.method}-${item.seed}-${item.index}`;
  const labelOf = (item) => item.is_correct === true ? ["right", "correct"] : item.is_correct === false ? ["wrong", "wrong"] : ["unlabelled", "no label"];
  const current = () => shown.list[shown.place];

  // ---- the tree ---------------------------------------------------------------------------------------------------
  function ordered(item) { // children stand in the order of their parents, best first
    let places = new Map();
    return item.columns.map((column) => {
      const best = (one) => one.numbers.score ?? -Infinity, place = (one) => places.get(one.parent) ?? -1;
      const sorted = column.slice().sort((a, b) => place(a) - place(b) || best(b) - best(a) || a.id - b.id);
      places = new Map(sorted.map((one, i) => [one.id, i]));
      return sorted;
    });
  }
  function scaleOf(item, key) {
    const values = item.columns.flat().map((one) => one.numbers[key]).filter((value) => value !== undefined).sort((a, b) => a - b);
    return values.length ? [values[0], values[values.length >> 1], values[values.length - 1]] : null;
  }
  function ground(card, value, scale) { // orange below the middle, blue above
    if (!scale || value === undefined) return;
    const below = value < scale[1], end = below ? scale[0] : scale[2], width = Math.abs(end - scale[1]);
    card.classList.add(below ? "lo" : "hi");
    card.style.setProperty("--a", width ? Math.min(1, Math.abs(value - scale[1]) / width).toFixed(2) : "0");
  }
  function textOf(one) {
    const box = element("span", "text", one.text.trim() === "" ? element("i", "", one.text ? "blank" : "nothing") : one.text.replace(/^\n+|\s+$/g, ""));
    box.dir = "auto";
    if (one.letters_left) box.append(element("i", "", ` … ${count(one.letters_left)} more letters`));
    return box;
  }
  function cardOf(one, onPath) {
    const card = element("button", `card ${CHOSEN.includes(one.fate) ? "chosen" : "left"} ${one.fate}${onPath ? " path" : ""}`);
    card.type = "button";
    card.dataset.id = one.id;
    const figures = Object.keys(SHORT).filter((key) => one.numbers[key] !== undefined).map((key) => `${SHORT[key]} ${number(one.numbers[key])}`);
    if (!("score" in one.numbers)) figures.unshift("no score");
    const notes = [one.fate === "kept" ? "" : one.fate, one.copies > 1 ? `drawn ${one.copies} times` : ""].filter(Boolean);
    card.append(textOf(one), element("span", "figures", figures.join(" · ")));
    if (notes.length || onPath) card.append(element("span", "fate", [...notes, onPath ? "on the path of the answer" : ""].filter(Boolean).join(" · ")));
    card.addEventListener("click", () => pick(one.id));
    return card;
  }
  function drawTree(item) {
    const box = byId("tree"), path = new Set(item.path), color = byId("pick-color").value, dropped = byId("with-dropped").checked;
    const scale = color && scaleOf(item, color);
    box.textContent = "";
    box.className = "tree";
    ordered(item).forEach((column, step) => {
      const left = column.filter((one) => !CHOSEN.includes(one.fate)).length;
      const part = element("div", "column", element("div", "step", `step ${step + 1}: ${column.length - left} kept, ${left} not`));
      for (const one of column) {
        if (!dropped && !CHOSEN.includes(one.fate) && !path.has(one.id)) continue;
        const card = cardOf(one, path.has(one.id));
        ground(card, one.numbers[color], scale);
        part.append(card);
      }
      box.append(part);
    });
    drawEdges(item);
    byId("legend").textContent = "Solid: kept, finished or cut off. Dashed and grey: not kept. Thick: the path of the answer. Equal texts of a step are one card. "
      + (scale ? `Orange is low (${number(scale[0])}), blue high (${number(scale[2])}), uncoloured the median of this tree (${number(scale[1])}). ` : "")
      + "Choose a card for all its numbers and the response up to there.";
  }
  function drawEdges(item) {
    const box = byId("tree"), lines = drawing("svg", { class: "edges", width: box.scrollWidth, height: box.scrollHeight, "aria-hidden": "true" }), nodes = new Map(item.columns.flat().map((one) => [one.id, one]));
    const cards = new Map([...box.querySelectorAll(".card")].map((card) => [Number(card.dataset.id), card])), path = new Set(item.path);
    for (const [id, card] of cards) {
      const parent = cards.get(nodes.get(id).parent);
      if (!parent) continue;
      const x1 = parent.offsetLeft + parent.offsetWidth, y1 = parent.offsetTop + parent.offsetHeight / 2, x2 = card.offsetLeft, y2 = card.offsetTop + card.offsetHeight / 2;
      const bend = (x1 + x2) / 2, kind = path.has(id) ? "path" : card.classList.contains("chosen") ? "chosen" : "left";
      lines.append(drawing("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`, class: kind }));
    }
    box.prepend(lines);
  }
  function pick(id) { // the numbers of one candidate
    const item = current(), box = byId("detail"), nodes = new Map(item.columns.flat().map((one) => [one.id, one]));
    shown.picked = shown.picked === id ? null : id;
    for (const card of byId("tree").querySelectorAll(".card")) card.classList.toggle("picked", Number(card.dataset.id) === shown.picked);
    box.hidden = shown.picked === null;
    box.textContent = "";
    if (box.hidden) return;
    const one = nodes.get(id), texts = [];
    for (let node = one; node; node = nodes.get(node.parent)) texts.unshift(node.text + (node.letters_left ? "…" : ""));
    const list = element("dl", "", ...Object.keys(NAMES).filter((key) => one.numbers[key] !== undefined).map((key) => pair(NAMES[key], number(one.numbers[key], 4))));
    if (one.similarities.length > 1) one.similarities.forEach((value, i) => list.append(pair(`similarity with goal ${i + 1}`, number(value, 4))));
    list.append(pair("tokens", count(one.tokens)), pair("candidate", FATES[one.fate]));
    box.append(element("h4", "", "The response up to the chosen card"), element("p", "response", texts.join("")), list);
  }

  // ---- the samples of a filtered vote -----------------------------------------------------------------------------
  function drawSamples(item) {
    const box = byId("tree"), longest = Math.max(1, ...item.samples.map((one) => one.policy_tokens));
    box.textContent = "";
    box.className = "samples";
    for (const one of item.samples) {
      const bar = element("span", "bar");
      bar.style.width = `${(100 * one.policy_tokens / longest).toFixed(1)}%`;
      const below = one.below === null || one.below === undefined ? "" : `, below at token ${count(one.below + 1)}`;
      const told = `${count(one.policy_tokens)} tokens, ${ENDS[one.end] || one.end}${below}`;
      const answer = one.answer === null || one.answer === undefined ? "no answer" : `answer ${one.answer}`;
      box.append(element("div", one.votes ? "sample" : "sample left", element("span", "name", `sample ${one.sample}`), element("span", "track", bar), element("span", "told", `${told} · ${answer}${one.votes ? "" : " · does not vote"}`)));
    }
    byId("legend").textContent = "One bar a sample, as long as its tokens; grey ones have no vote.";
  }

  // ---- the question -----------------------------------------------------------------------------------------------
  function drawSteps() {
    const item = current(), samples = Boolean(item.samples);
    byId("detail").hidden = true;
    shown.picked = null;
    byId("tree-heading").textContent = samples ? "Samples" : "Steps, from left to right";
    for (const id of ["pick-color", "with-dropped"]) byId(id).parentElement.hidden = samples;
    if (samples) drawSamples(item); else drawTree(item);
  }
  function view() {
    const item = current();
    for (const id of ["view", "tree-heading", "tree-box", "legend"]) byId(id).hidden = !item;
    if (!item) { byId("detail").hidden = true; return; }
    const [className, words] = labelOf(item);
    byId("heading").replaceChildren(element("span", className, words), ` · question ${item.index} · ${runOf(item)}`);
    byId("question").textContent = item.question;
    byId("response").textContent = item.response ?? "";
    byId("response").hidden = byId("response-heading").hidden = item.response === null;
    const facts = [["answer", item.answer ?? "none found"], ["expected", item.expected_answer ?? "not known"], ["policy tokens", count(item.policy_tokens)], ["reward tokens", count(item.reward_tokens)]];
    if (item.finished === false) facts.push(["response", "not finished"]);
    byId("facts").replaceChildren(...facts.map(([name, value]) => pair(name, value)));
    byId("position").textContent = `${count(shown.place + 1)} of ${count(shown.list.length)}`;
    byId("previous").disabled = shown.place === 0;
    byId("next").disabled = shown.place === shown.list.length - 1;
    drawSteps();
    byId("tree-box").scrollLeft = 0;
  }

  // ---- list and search --------------------------------------------------------------------------------------------
  let rendered = 0;
  function extendList() {
    const until = Math.min(shown.list.length, rendered + LIST_CHUNK);
    for (; rendered < until; rendered++) {
      const item = shown.list[rendered], place = rendered, [className, words] = labelOf(item), button = element("button", "");
      button.type = "button";
      button.append(element("span", className, words), ` ${item.index} · ${runOf(item)}`, element("span", "begin", item.question.slice(0, 90)));
      button.addEventListener("click", () => select(place, true));
      byId("list").append(element("li", "", button));
    }
  }
  function select(place, link) {
    if (place < 0 || place >= shown.list.length) return;
    shown.place = place;
    view();
    while (rendered <= place) extendList();
    for (const entry of byId("list").querySelectorAll("[aria-current]")) entry.removeAttribute("aria-current");
    const entry = byId("list").children[place];
    entry.firstChild.setAttribute("aria-current", "true");
    const box = byId("list-box"), seen = box.getBoundingClientRect(), spot = entry.getBoundingClientRect();
    if (spot.top < seen.top || spot.bottom > seen.bottom) box.scrollTop += spot.top - seen.top - seen.height / 2;
    if (link) try { history.replaceState(null, "", `#${nameOf(current())}`); } catch { /* some browsers refuse many changes in a short time */ }
  }
  function relist(keep, link) {
    const run = byId("pick-run").value, label = byId("pick-label").value, words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kinds = { all: () => true, correct: (one) => one.is_correct === true, wrong: (one) => one.is_correct === false, none: (one) => one.is_correct === null };
    shown.list = items.filter((item) => {
      if (run && runOf(item) !== run || !kinds[label](item)) return false;
      const text = [item.question, item.response, item.answer, item.expected_answer, nameOf(item)].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    byId("list").textContent = "";
    rendered = 0;
    shown.place = -1;
    extendList();
    if (shown.list.length) select(Math.max(0, shown.list.indexOf(keep)), link);
    else { byId("list").append(element("li", "none", "No question matches.")); byId("position").textContent = ""; view(); }
  }

  // ---- start ------------------------------------------------------------------------------------------------------
  if (!items.length) return;
  byId("browser").hidden = false;
  const runs = [...new Set(items.map(runOf))], present = new Set(items.flatMap((item) => (item.columns || []).flat()).flatMap((one) => Object.keys(one.numbers)));
  byId("pick-run").append(...[["", "all"], ...runs.map((run) => [run, run])].map(([value, words]) => Object.assign(element("option", "", words), { value })));
  byId("pick-run").parentElement.hidden = runs.length < 2;
  byId("pick-color").append(...[["", "none"], ...Object.keys(NAMES).filter((key) => present.has(key)).map((key) => [key, NAMES[key]])].map(([value, words]) => Object.assign(element("option", "", words), { value })));
  for (const id of ["pick-run", "pick-label"]) byId(id).addEventListener("change", () => relist(current(), true));
  for (const id of ["pick-color", "with-dropped"]) byId(id).addEventListener("change", drawSteps);
  let waiting;
  byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => relist(current(), true), 120); });
  byId("previous").addEventListener("click", () => select(shown.place - 1, true));
  byId("next").addEventListener("click", () => select(shown.place + 1, true));
  byId("list-box").addEventListener("scroll", () => { const box = byId("list-box"); if (box.scrollTop + box.clientHeight > box.scrollHeight - 300) extendList(); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, .tree-box")) return;
    const move = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 }[event.key];
    if (move) { event.preventDefault(); select(shown.place + move, true); }
    if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  });
  addEventListener("resize", () => { if (current() && current().columns) drawTree(current()); });
  const openHash = () => { const item = items.find((one) => `#${nameOf(one)}` === location.hash); if (item) { byId("pick-run").value = byId("search").value = ""; byId("pick-label").value = "all"; } return item; };
  addEventListener("hashchange", () => relist(openHash(), false));
  relist(openHash(), false);
})();
