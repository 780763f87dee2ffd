"use strict";
// What the scripts of all pages share. Text of the data only ever becomes textContent, never markup.
const Page = (() => {
  const SVG = "http://www.w3.org/2000/svg"; // a name, not an address that is loaded
  const byId = (id) => document.getElementById(id);
  function element(name, className, ...content) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...content.filter((part) => part !== undefined && part !== null).map((part) => (part instanceof Node ? part : String(part))));
    return made;
  }
  function drawing(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const number = (value, digits = 3) => value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
  const count = (value) => value.toLocaleString("en");
  const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;
  const pair = (name, value) => element("div", "", element("dt", "", name), element("dd", "", value));
  function niceStep(span) { // of the ticks of an axis
    const rough = span / 4, power = 10 ** Math.floor(Math.log10(rough));
    return power * ([1, 2, 5, 10].find((step) => step * power >= rough) || 10);
  }
  return { byId, element, drawing, number, count, plural, pair, niceStep, data: JSON.parse(byId("packed").textContent) };
})();
