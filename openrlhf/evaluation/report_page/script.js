"use strict";
// The browser of single completions.
(() => {
  const { byId, element, drawing, number, count, plural, pair, niceStep, data } = Page;
  const single = document.body.classList.contains("single"); // the view of one response, without a list
  const FIRST_TOKENS = 1500, FIRST_LETTERS = 8000, LIST_CHUNK = 60, PRINTED = 3, PRINTED_TOKENS = 400, MAX_TABLE_ROWS = 5000;

  // ---- data -------------------------------------------------------------------------------------------------------
  function integers(text, signed) {
    const letters = atob(text), bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    const view = new DataView(bytes.buffer), numbers = new Array(bytes.length / 2);
    for (let i = 0; i < numbers.length; i++) numbers[i] = signed ? view.getInt16(2 * i, true) : view.getUint16(2 * i, true);
    return numbers;
  }
  const items = [];
  for (const group of data.groups) {
    group.lowest = { correct: integers(group.lowest.correct, true), wrong: integers(group.lowest.wrong, true) };
    group.wanted = group.threshold; // moved by the slider
    group.on = group.threshold !== null;
    for (const row of group.rows) items.push({ group, row });
  }
  function curves(item) { // per-token numbers, unpacked when first needed
    if (!item.curves) {
      const { rewards, similarity, ends } = item.row;
      item.curves = {
        rewards: rewards && integers(rewards[2], false).map((step) => rewards[0] + step / 65535 * (rewards[1] - rewards[0])),
        similarity: similarity && integers(similarity, true).map((step) => step / 32767),
      };
      const text = data.strings[item.row.text];
      let from = 0;
      item.texts = ends && integers(ends, false).map((letters) => text.slice(from, from += letters));
      item.unread = ends ? text.slice(from) : "";
    }
    return item.curves;
  }
  const question = (item) => data.strings[item.row.question];
  const sameCompletion = (a, b) => a.group.set === b.group.set && a.row.text === b.row.text
    && a.row.question === b.row.question && a.row.sample === b.row.sample;
  function cutOf(item) {
    const { group, row } = item;
    if (!group.on || group.wanted === null || !row.similarity) return null;
    if (group.wanted === group.threshold) return row.cut; // exact, from the unrounded numbers
    const found = curves(item).similarity.findIndex((value, i) => i >= data.warmup && value < group.wanted);
    return found < 0 ? null : found;
  }

  // ---- small helpers ----------------------------------------------------------------------------------------------
  const labelOf = (row) => row.correct === true ? ["right", "✓ correct"] : row.correct === false ? ["wrong", "✗ wrong"] : ["unlabelled", "– no label"];

  // ---- one completion, on screen and in print ---------------------------------------------------------------------
  const shown = { list: [], place: -1, color: "similarity", all: false, at: null };
  const current = () => shown.list[shown.place];
  const colorKey = (item) => shown.color === "similarity" && item.row.similarity ? "similarity" : item.row.rewards ? "rewards" : null;
  const scaleOf = (group, key) => key === "similarity" ? group.similarity_scale : group.reward_scale;

  function paint(span, value, scale) {
    const [low, middle, high] = scale;
    const end = value < middle ? low : high;
    const share = end === middle ? 0 : Math.min(1, (value - middle) / (end - middle));
    span.classList.add(value < middle ? "lo" : "hi");
    span.style.setProperty("--a", share.toFixed(3));
  }
  function fillTokens(box, item, limit) {
    const values = curves(item), key = colorKey(item), scale = key && scaleOf(item.group, key);
    box.textContent = "";
    if (!item.texts) {
      const text = data.strings[item.row.text];
      box.append(element("span", "", limit < Infinity ? text.slice(0, FIRST_LETTERS) : text));
      return;
    }
    const fragment = document.createDocumentFragment();
    const last = Math.min(item.texts.length, limit);
    for (let i = 0; i < last; i++) {
      const text = item.texts[i], end = i === item.texts.length - 1 && text === "";
      if (text === "" && !end) continue; // a token inside a character
      const span = element("span", end ? "t end" : "t");
      span.dataset.i = i;
      if (end) span.textContent = "end";
      else if (!text.includes("\n")) span.textContent = text;
      else text.split("\n").forEach((line, k) => span.append(...(k ? [element("i", "nl"), "\n", line] : [line])));
      if (key) paint(span, values[key][i], scale);
      if (item.row.wrong_step && i >= item.row.wrong_step[0] && i <= item.row.wrong_step[1]) span.classList.add("slip");
      fragment.append(span);
    }
    if (last === item.texts.length && item.unread) fragment.append(element("span", "unread", item.unread));
    box.append(fragment);
    markCut(box, item);
  }
  function markCut(box, item) {
    const cut = cutOf(item);
    for (const span of box.querySelectorAll("[data-i]")) {
      span.classList.toggle("off", cut !== null && Number(span.dataset.i) > cut);
      span.classList.toggle("cut", Number(span.dataset.i) === cut);
    }
  }
  function fillLegend(box, item) {
    const key = colorKey(item);
    box.textContent = "";
    if (!key || !item.row.ends) return;
    const scale = scaleOf(item.group, key), ends = element("div", "ends");
    ends.append(element("span", "", number(scale[0], 2)), element("span", "", `${key === "similarity" ? "goal similarity" : "reward"}, median ${number(scale[1], 2)}`), element("span", "", number(scale[2], 2)));
    box.append(element("div", "bar"), ends);
    if (item.row.wrong_step) box.append(element("p", "slip-note", "underlined: the first wrong step"));
    box.title = "from the 2nd to the 98th percentile of all tokens of this set";
  }
  function facts(item) {
    const { row, group } = item, found = [];
    if (!single || row.predicted !== null) found.push(["predicted", row.predicted ?? "no answer found"]);
    if (!single || row.expected !== null) found.push(["expected", row.expected ?? "not known"]);
    found.push(["reward", row.reward === null ? "none" : number(row.reward)]);
    if (row.last !== null) found.push(["goal similarity at the end", number(row.last)], ["lowest", number(row.lowest)]);
    found.push(["tokens", count(row.tokens) + (row.truncated ? ", cut to fit the model" : "")]);
    if (!single) {
      if (row.sample !== null) found.push(["sample", row.sample]);
      found.push(["row", `${count(row.place + 1)} of ${count(group.total)}`]);
    }
    for (const key in row.extra) found.push([key.replaceAll("_", " "), row.extra[key]]);
    return found;
  }
  function fillFacts(list, item) {
    list.textContent = "";
    for (const [name, value] of facts(item)) list.append(pair(name, value));
  }
  function fillHeading(heading, item) {
    const [className, words] = labelOf(item.row);
    heading.textContent = "";
    if (single) heading.append(...(item.row.correct === null ? [] : [element("span", className, words), " · "]), item.group.model);
    else heading.append(element("span", className, words), ` · ${item.group.set} · ${item.group.model}`);
    if (item.row.truncated) heading.append(" · truncated");
  }

  // ---- curves -----------------------------------------------------------------------------------------------------
  function drawCurve(item, key, width, axisLabel) {
    const values = curves(item)[key], n = values.length, name = key === "similarity" ? "goal similarity" : "reward";
    const height = 128, left = 46, right = 10, top = 22, bottom = axisLabel ? 30 : 12;
    const threshold = key === "similarity" && item.group.on ? item.group.wanted : null, cut = cutOf(item);
    let low = Infinity, high = -Infinity, lowestAt = 0;
    values.forEach((value, i) => { if (value < low) { low = value; lowestAt = i; } high = Math.max(high, value); });
    const lowest = low;
    if (threshold !== null) { low = Math.min(low, threshold); high = Math.max(high, threshold); }
    const pad = (high - low) * .08 || .05;
    low -= pad; high += pad;
    const x = (i) => left + (n < 2 ? .5 : i / (n - 1)) * (width - left - right);
    const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
    const box = drawing("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, height, preserveAspectRatio: "xMinYMin", role: "img" });
    box.setAttribute("aria-label", `${name} by token: starts at ${number(values[0])}, lowest ${number(lowest)} at token ${lowestAt + 1}, ends at ${number(values[n - 1])}` + (cut === null ? "" : `; stopped at token ${cut + 1}`));
    if (cut !== null) box.append(drawing("rect", { class: "behind", x: x(cut), y: top, width: Math.max(0, width - right - x(cut)), height: height - top - bottom }));
    const step = niceStep(high - low), digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) {
      box.append(drawing("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
        drawing("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, number(Math.abs(tick) < step / 1e6 ? 0 : tick, digits)));
    }
    const points = [], columns = 2 * (width - left - right);
    if (n <= columns) values.forEach((value, i) => points.push([i, value]));
    else for (let c = 0; c < columns / 2; c++) { // keep the lowest and highest value of each column of pixels
      const from = Math.floor(c * n / (columns / 2)), to = Math.max(from + 1, Math.floor((c + 1) * n / (columns / 2)));
      let a = from, b = from;
      for (let i = from; i < to; i++) { if (values[i] < values[a]) a = i; if (values[i] > values[b]) b = i; }
      for (const i of a < b ? [a, b] : [b, a]) points.push([i, values[i]]);
    }
    box.append(drawing("path", { class: "line", d: points.map(([i, value], k) => `${k ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("") }));
    if (n <= 80) for (const [i, value] of points) box.append(drawing("circle", { class: "dot", cx: x(i), cy: y(value), r: n <= 40 ? 2 : 1.4 }));
    if (threshold !== null) {
      box.append(drawing("line", { class: "threshold", x1: left, x2: width - right, y1: y(threshold), y2: y(threshold) }),
        drawing("text", { class: "warm", x: width - right, y: y(threshold) + (y(threshold) > top + 24 ? -5 : 13), "text-anchor": "end" }, `threshold ${number(threshold)}`));
    }
    if (cut !== null) {
      box.append(drawing("line", { class: "stop", x1: x(cut), x2: x(cut), y1: top, y2: height - bottom }));
      if (key === "similarity") box.append(drawing("text", { class: "warm", x: width - right, y: 12, "text-anchor": "end" }, `stopped at token ${count(cut + 1)}`));
    }
    box.append(drawing("text", { class: "name", x: left, y: 12 }, name));
    if (axisLabel) box.append(drawing("text", { x: left, y: height - 6 }, "token 1"), drawing("text", { x: width - right, y: height - 6, "text-anchor": "end" }, `token ${count(n)}`));
    const cursor = drawing("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
    box.append(cursor);
    box.moveCursor = (i) => { cursor.setAttribute("visibility", i === null ? "hidden" : "visible"); if (i !== null) { cursor.setAttribute("x1", x(i)); cursor.setAttribute("x2", x(i)); } };
    box.tokenAt = (event) => {
      const place = box.getBoundingClientRect(), px = (event.clientX - place.left) * width / place.width;
      return Math.max(0, Math.min(n - 1, Math.round((px - left) / (width - left - right) * (n - 1))));
    };
    return box;
  }
  function fillCurves(box, item, width, live) {
    const found = ["similarity", "rewards"].filter((key) => curves(item)[key] && curves(item)[key].length);
    box.textContent = "";
    found.forEach((key, place) => {
      const curve = drawCurve(item, key, width, place === found.length - 1);
      if (live) {
        curve.addEventListener("pointermove", (event) => pointAt(curve.tokenAt(event)));
        curve.addEventListener("pointerdown", (event) => pointAt(curve.tokenAt(event)));
        curve.addEventListener("pointerleave", () => pointAt(null));
      }
      box.append(curve);
    });
  }

  // ---- the token under the pointer --------------------------------------------------------------------------------
  function pointAt(i) {
    const item = current();
    if (!item) return;
    const before = shown.at === null ? null : byId("tokens").querySelector(`[data-i="${shown.at}"]`);
    if (before) before.classList.remove("at");
    shown.at = i;
    const span = i === null ? null : byId("tokens").querySelector(`[data-i="${i}"]`);
    if (span) span.classList.add("at");
    for (const curve of byId("curves").children) curve.moveCursor(i);
    tokenNote(item, i);
  }
  function tokenNote(item, i) {
    const note = byId("token-note"), values = curves(item);
    note.textContent = "";
    if (!item.row.tokens) note.textContent = "Not scored: the prompt left no room for the response.";
    else if (i !== null) {
      note.append(element("b", "", `Token ${count(i + 1)} of ${count(item.row.tokens)}`), " ");
      if (item.texts) note.append(i === item.texts.length - 1 && item.texts[i] === "" ? "end of the response" : item.texts[i] === "" ? "part of a character" : element("bdi", "", JSON.stringify(item.texts[i])));
      if (values.similarity) note.append(" · goal similarity ", element("b", "", number(values.similarity[i])));
      if (values.rewards) note.append(" · reward ", element("b", "", number(values.rewards[i])));
    } else if (!item.texts) {
      note.textContent = "No colours: these rows were scored without the places where tokens end (token_ends). Score them again to see each token.";
    } else if (!values.similarity) {
      note.textContent = "Scored without a goal state: there is no goal similarity, and colours show the reward. Point at a token for its numbers.";
    } else note.textContent = "Point at a token or at a curve for its numbers; with the response in focus, the arrow keys move from token to token.";
    if (i === null && item.unread) note.append(` The last ${plural(item.unread.length, "letter")} did not fit the model and ${item.unread.length === 1 ? "was" : "were"} not read.`);
  }

  // ---- filter -----------------------------------------------------------------------------------------------------
  function shareBelow(sorted, threshold) {
    let low = 0, high = sorted.length;
    while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] / 32767 < threshold) low = middle + 1; else high = middle; }
    return low / sorted.length;
  }
  function fillFilter(item) {
    const { group, row } = item;
    byId("stopping").hidden = !row.similarity;
    if (!row.similarity) return;
    const all = [...group.lowest.correct, ...group.lowest.wrong, Math.round(row.lowest * 32767)];
    const low = Math.floor(Math.min(...all) / 32.767) / 1000, high = Math.ceil(1000 * Math.max(group.similarity_scale[2], group.threshold ?? -1)) / 1000;
    const slider = byId("threshold"), entry = byId("threshold-number");
    Object.assign(slider, { min: low, max: high, step: .001, disabled: !group.on });
    entry.disabled = !group.on;
    byId("filter-on").checked = group.on;
    slider.value = group.wanted ?? low;
    if (document.activeElement !== entry) entry.value = group.wanted === null ? "" : group.wanted.toFixed(3);
    byId("threshold-reset").hidden = group.wanted === group.threshold && group.on === (group.threshold !== null);
    cutNote(item);
  }
  function cutNote(item) {
    const { group, row } = item, note = byId("cut-note"), cut = cutOf(item), words = [];
    if (group.on && group.wanted !== null) {
      words.push(cut === null ? "This response is kept." : `This response is stopped at token ${count(cut + 1)} of ${count(row.tokens)}: ${Math.round(100 * (1 - (cut + 1) / row.tokens))}% of its tokens are saved.`);
      const { correct, wrong } = group.lowest;
      if (!single && (correct.length || wrong.length)) {
        const parts = [];
        if (correct.length) parts.push(`keeps ${(100 * (1 - shareBelow(correct, group.wanted))).toFixed(1)}% of the correct`);
        if (wrong.length) parts.push(`stops ${(100 * shareBelow(wrong, group.wanted)).toFixed(1)}% of the wrong`);
        words.push(`In the whole set this threshold ${parts.join(" and ")} completions.`);
      }
    } else if (group.threshold === null) words.push(single ? "Switch it on to try a threshold." : "No threshold was chosen for this set; switch it on to try one.");
    note.textContent = words.join(" ");
  }
  function moveThreshold(value) {
    const item = current();
    if (!item || Number.isNaN(value)) return;
    item.group.wanted = Math.max(-1, Math.min(1, value));
    refreshSoon();
  }
  let waitingToRefresh = false;
  function refreshSoon() { // a slider moves faster than a long response can be drawn
    if (waitingToRefresh) return;
    waitingToRefresh = true;
    requestAnimationFrame(() => { waitingToRefresh = false; if (current()) refresh(); });
  }
  function refresh() { // what depends on the threshold
    const item = current();
    fillFilter(item);
    markCut(byId("tokens"), item);
    fillCurves(byId("curves"), item, curveWidth(), true);
    pointAt(shown.at);
  }

  // ---- the completion on the right --------------------------------------------------------------------------------
  const curveWidth = () => Math.max(260, byId("curves").clientWidth);
  function fillColors(item) {
    const box = byId("colors"), keys = [["similarity", "goal similarity"], ["rewards", "reward"]].filter(([key]) => item.row[key]);
    box.textContent = "";
    if (keys.length < 2 || !item.row.ends) return;
    for (const [key, words] of keys) {
      const button = element("button", "", words);
      button.type = "button";
      button.setAttribute("aria-pressed", String(colorKey(item) === key));
      button.addEventListener("click", () => { shown.color = key; view(false); });
      box.append(button);
    }
  }
  function fillReason(item) {
    const box = byId("reason");
    box.textContent = item.row.reason ? item.row.reason[0].toUpperCase() + item.row.reason.slice(1) + "." : "";
    const others = items.filter((other) => other !== item && other.group !== item.group && sameCompletion(other, item));
    if (!others.length) return;
    box.append(" The same completion under ");
    others.forEach((other, i) => {
      const button = element("button", "", other.group.model);
      button.type = "button";
      button.addEventListener("click", () => open(other));
      box.append(i ? ", " : "", button);
    });
  }
  function view(fresh) {
    const item = current();
    byId("view").hidden = !item;
    if (!item) return;
    if (fresh) { shown.all = false; byId("numbers").open = false; byId("numbers-box").textContent = ""; }
    fillHeading(byId("heading"), item);
    fillReason(item);
    byId("question").textContent = question(item);
    fillFacts(byId("answers"), item);
    fillColors(item);
    fillLegend(byId("legend"), item);
    fillTokens(byId("tokens"), item, shown.all ? Infinity : FIRST_TOKENS);
    shown.at = null;
    refresh();
    const letters = data.strings[item.row.text].length;
    const hidden = item.texts ? item.texts.length - FIRST_TOKENS : letters - FIRST_LETTERS;
    byId("more").hidden = shown.all || hidden <= 0;
    byId("more").textContent = `show the other ${plural(hidden, item.texts ? "token" : "letter")}`;
    byId("numbers").hidden = !item.row.tokens;
    byId("position").textContent = `${count(shown.place + 1)} of ${count(shown.list.length)}`;
    byId("previous").disabled = shown.place === 0;
    byId("next").disabled = shown.place === shown.list.length - 1;
  }
  function fillNumbers() {
    const item = current(), values = curves(item), table = element("table"), head = element("tr"), body = element("tbody");
    const columns = [["token", (i) => count(i + 1)], ["text", (i) => item.texts ? JSON.stringify(item.texts[i]) : ""]];
    if (values.similarity) columns.push(["goal similarity", (i) => number(values.similarity[i])]);
    if (values.rewards) columns.push(["reward", (i) => number(values.rewards[i])]);
    for (const [name] of columns) { const cell = element("th", name === "text" || name === "token" ? "" : "number", name); cell.scope = "col"; head.append(cell); }
    for (let i = 0; i < Math.min(item.row.tokens, MAX_TABLE_ROWS); i++) {
      const row = element("tr");
      columns.forEach(([name, value], k) => { const cell = element("td", k > 1 ? "number" : ""); cell.append(element(name === "text" ? "bdi" : "span", "", value(i))); row.append(cell); });
      body.append(row);
    }
    const top = element("thead");
    top.append(head);
    table.append(top, body);
    byId("numbers-box").replaceChildren(table);
    if (item.row.tokens > MAX_TABLE_ROWS) byId("numbers-box").append(element("p", "note", `The first ${count(MAX_TABLE_ROWS)} of ${count(item.row.tokens)} tokens.`));
  }

  // ---- list, order and search -------------------------------------------------------------------------------------
  const last = (value, high) => value === null ? Infinity : high ? -value : value;
  const ORDERS = {
    instructive: (item) => item.row.order / item.group.total, // fair between sets of different size
    "reward-high": (item) => last(item.row.reward, true),
    "reward-low": (item) => last(item.row.reward, false),
    "last-high": (item) => last(item.row.last, true),
    "last-low": (item) => last(item.row.last, false),
    lowest: (item) => last(item.row.lowest, false),
    fall: (item) => { // in widths of the scale, since models differ in their units
      const scale = scaleOf(item.group, item.row.similarity ? "similarity" : "rewards");
      return scale ? -item.row.fall / (scale[2] - scale[0] || 1) : 0;
    },
    longest: (item) => -item.row.tokens,
    place: (item) => item.row.place,
  };
  let rendered = 0;
  function extendList() {
    const list = byId("list"), until = Math.min(shown.list.length, rendered + LIST_CHUNK);
    for (; rendered < until; rendered++) {
      const item = shown.list[rendered], entry = element("li"), button = element("button"), [className, words] = labelOf(item.row), place = rendered;
      button.type = "button";
      const line = element("span", "line");
      line.append(element("span", className, words), element("span", "", number(item.row.reward, 2)), element("span", "", number(item.row.last, 2)));
      const model = data.groups.length > 1 && byId("pick-model").value === "" ? `${item.group.model}: ` : "";
      button.append(line, element("span", "begin", model + question(item).slice(0, 90)));
      button.addEventListener("click", () => select(place, true));
      entry.append(button);
      list.append(entry);
    }
  }
  function markList() {
    for (const entry of byId("list").querySelectorAll("[aria-current]")) entry.removeAttribute("aria-current");
    while (rendered <= shown.place && rendered < shown.list.length) extendList();
    const entry = byId("list").children[shown.place];
    if (!entry || !entry.firstChild.setAttribute) return;
    entry.firstChild.setAttribute("aria-current", "true");
    const box = byId("list-box"), seen = box.getBoundingClientRect(), place = entry.getBoundingClientRect();
    const head = box.firstElementChild.offsetHeight; // the column names stay above the entries
    if (place.top < seen.top + head) box.scrollTop -= seen.top + head - place.top;
    else if (place.bottom > seen.bottom) box.scrollTop += place.bottom - seen.bottom;
  }
  function select(place, link) {
    if (place < 0 || place >= shown.list.length) return;
    shown.place = place;
    view(true);
    markList();
    if (link) {
      const hash = `#${current().row.id}`;
      try { history.replaceState(null, "", hash); } catch { /* some browsers refuse many changes in a short time */ }
    }
  }
  function relist(keep, link) {
    const wanted = { set: byId("pick-set").value, model: byId("pick-model").value, label: byId("pick-label").value };
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), key = ORDERS[byId("pick-order").value];
    shown.list = items.filter((item) => {
      const { row, group } = item, label = row.correct === true ? "correct" : row.correct === false ? "wrong" : "none";
      if (wanted.set !== "" && group.set !== wanted.set || wanted.model !== "" && group.model !== wanted.model) return false;
      if (wanted.label !== "all" && label !== wanted.label) return false;
      if (!words.length) return true;
      item.search ??= [question(item), data.strings[row.text], row.predicted, row.expected, row.id, ...Object.values(row.extra)].join("\n").toLowerCase();
      return words.every((word) => item.search.includes(word));
    });
    const keys = new Map(shown.list.map((item) => [item, key(item)]));
    shown.list.sort((a, b) => keys.get(a) - keys.get(b) || a.row.order - b.row.order);
    byId("list").textContent = "";
    rendered = 0;
    extendList();
    byId("list-box").scrollTop = 0;
    shown.place = shown.list.length ? Math.max(0, keep ? shown.list.indexOf(keep) : 0) : -1;
    if (!shown.list.length) { byId("list").append(element("li", "none", "No completion matches.")); view(true); byId("position").textContent = ""; } else select(shown.place, link);
  }
  function open(item) { // whatever is filtered now
    if (!shown.list.includes(item)) {
      byId("pick-set").value = byId("pick-model").value = byId("search").value = "";
      byId("pick-label").value = "all";
    }
    relist(item, true);
  }
  function openHash() {
    const item = items.find((one) => `#${one.row.id}` === location.hash);
    if (!item) return;
    open(item);
    byId("browser").scrollIntoView();
  }

  // ---- start ------------------------------------------------------------------------------------------------------
  function options(box, values, words) {
    box.append(Object.assign(element("option", "", words), { value: "" }));
    for (const value of values) box.append(Object.assign(element("option", "", value), { value }));
    box.parentElement.hidden = values.length < 2;
  }
  function fillPrinted() {
    const box = byId("printed"), first = items.slice().sort((a, b) => ORDERS.instructive(a) - ORDERS.instructive(b)).slice(0, PRINTED);
    if (first.length > 1) box.append(element("p", "lead", `The ${first.length} most instructive of ${plural(items.length, "completion")} that the page shows on screen.`));
    for (const item of first) {
      const part = element("article", "printed"), heading = element("h3"), list = element("dl"), legend = element("div", "legend"), tokens = element("div", "tokens"), lines = element("div");
      fillHeading(heading, item);
      fillFacts(list, item);
      fillLegend(legend, item);
      fillTokens(tokens, item, PRINTED_TOKENS);
      if (item.row.tokens > PRINTED_TOKENS) tokens.append(element("span", "unread", ` … (${plural(item.row.tokens - PRINTED_TOKENS, "more token")})`));
      fillCurves(lines, item, 640, false);
      part.append(heading, element("p", "question", question(item)), list, legend, tokens, lines);
      box.append(part);
    }
  }
  function start() {
    if (!items.length) { byId("printed").before(element("p", "lead", "No completions are shown.")); return; }
    byId("browser").hidden = false;
    const total = data.groups.reduce((sum, group) => sum + group.total, 0), skipped = data.groups.reduce((sum, group) => sum + group.left_out_for_size, 0);
    byId("shown").textContent = (items.length === total ? `All ${plural(total, "scored completion")}.` : `${count(items.length)} of ${plural(total, "scored completion")}: of each set and model, one half the most instructive, the other drawn at random.`)
      + (skipped ? ` ${plural(skipped, "long completion")} left out to keep the file small.` : "")
      + ` They take ${(byId("packed").textContent.length / 1e6).toFixed(1)} MB of this file.`
      + " Most instructive first: wrong ones with a high reward, correct ones with a low reward, then the steepest falls.";
    options(byId("pick-set"), [...new Set(data.groups.map((group) => group.set))], "all sets");
    options(byId("pick-model"), [...new Set(data.groups.map((group) => group.model))], "all models");
    for (const id of ["pick-set", "pick-model", "pick-label", "pick-order"]) byId(id).addEventListener("change", () => relist(null, true));
    let waiting;
    byId("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => relist(current(), true), 120); });
    byId("previous").addEventListener("click", () => select(shown.place - 1, true));
    byId("next").addEventListener("click", () => select(shown.place + 1, true));
    byId("more").addEventListener("click", () => { shown.all = true; view(false); });
    byId("numbers").addEventListener("toggle", () => { if (byId("numbers").open) fillNumbers(); });
    byId("list-box").addEventListener("scroll", () => { const box = byId("list-box"); if (box.scrollTop + box.clientHeight > box.scrollHeight - 300) extendList(); });

    const tokens = byId("tokens");
    tokens.tabIndex = 0;
    tokens.addEventListener("pointerover", (event) => { const span = event.target.closest("[data-i]"); if (span) pointAt(Number(span.dataset.i)); });
    tokens.addEventListener("click", (event) => { const span = event.target.closest("[data-i]"); if (span) pointAt(Number(span.dataset.i)); });
    tokens.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") pointAt(null); });
    tokens.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      pointAt(Math.max(0, Math.min(current().row.tokens - 1, (shown.at ?? -1) + move)));
    });
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, summary, .scroll")) return;
      const move = { ArrowLeft: -1, k: -1, ArrowRight: 1, j: 1 }[event.key];
      if (move) { event.preventDefault(); select(shown.place + move, true); }
      if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
    });
    byId("threshold").addEventListener("input", (event) => moveThreshold(Number(event.target.value)));
    byId("threshold-number").addEventListener("input", (event) => moveThreshold(event.target.value === "" ? NaN : Number(event.target.value)));
    byId("threshold-number").addEventListener("change", () => fillFilter(current()));
    byId("filter-on").addEventListener("change", (event) => {
      const { group } = current();
      group.on = event.target.checked;
      if (group.on && group.wanted === null) group.wanted = group.similarity_scale[0];
      refresh();
    });
    byId("threshold-reset").addEventListener("click", () => { const { group } = current(); group.wanted = group.threshold; group.on = group.threshold !== null; refresh(); });
    let resizing;
    addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { if (current()) refresh(); }, 100); });
    addEventListener("hashchange", openHash);
    fillPrinted();
    relist(null, false);
    openHash();
  }
  start();
})();
