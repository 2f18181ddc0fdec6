"use strict";
// Theme, search, links into folded parts, keys, copying and the colours of code. The page can be read
// without any of it.

const stored = {
  get theme() { try { return localStorage.getItem("tileops-theme"); } catch { return null; } },
  set theme(name) { try { localStorage.setItem("tileops-theme", name); } catch { /* no storage here */ } },
};
if (stored.theme) document.documentElement.style.colorScheme = stored.theme;  // before the first paint

document.addEventListener("DOMContentLoaded", () => {
  theme();
  search();
  contents();
  unfold(document);
  document.addEventListener("click", copy);
  addEventListener("hashchange", arrive);
  arrive();
  document.addEventListener("toggle", (event) => unfold(event.target), true);
});

// What a long page has folded away costs nothing until it comes into view.
function unfold(place) {
  place.querySelectorAll("[data-rove]").forEach((list) => once(list, rove));
  place.querySelectorAll("[data-source], [data-language]").forEach((code) => once(code, paint));
}

const met = new Map();  // of each kind of work
function once(element, work) {
  if (!met.has(work)) met.set(work, new WeakSet());
  if (met.get(work).has(element) || !element.checkVisibility()) return;
  met.get(work).add(element);
  work(element);
}

const byId = (id) => document.getElementById(id);
const say = (text) => { byId("announce").textContent = text; };

// ---- theme ----------------------------------------------------------------------------------

function theme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (stored.theme ? stored.theme === "dark" : system.matches);
  const show = () => {
    document.documentElement.style.colorScheme = stored.theme || "";
    button.setAttribute("aria-pressed", String(dark()));
  };
  let chosen = stored.theme;
  button.addEventListener("click", () => {
    stored.theme = chosen = dark() ? "light" : "dark";
    document.documentElement.style.colorScheme = chosen;
    button.setAttribute("aria-pressed", String(chosen === "dark"));
  });
  system.addEventListener("change", show);
  show();
}

// ---- links ----------------------------------------------------------------------------------

// What a link leads to may be folded away: unfold it, and put the reader there.
function arrive() {
  const goal = byId(decodeURIComponent(location.hash.slice(1)));
  if (!goal) return;
  for (let part = goal; part; part = part.parentElement) {
    if (part.localName === "details") part.open = true;
  }
  const focus = goal.localName === "details" ? goal.querySelector("summary") : goal;
  if (focus.tabIndex < 0 && !focus.hasAttribute("tabindex")) focus.tabIndex = -1;
  focus.focus({ preventScroll: true });
  goal.scrollIntoView();
}

function contents() {
  const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const now = [...links.keys()].find((id) => seen.has(id));
    links.forEach((a, id) => (id === now ? a.setAttribute("aria-current", "true") : a.removeAttribute("aria-current")));
  }, { rootMargin: "-20% 0px -60% 0px" });
  links.forEach((_, id) => watch.observe(byId(id)));
  if (matchMedia("(max-width: 60rem)").matches) document.querySelector(".contents details").open = false;
}

// ---- keys -----------------------------------------------------------------------------------

// One stop of the tab key in a long list; arrows move within it. Rows are lines or table rows.
function rove(list) {
  const inRow = (row) => [...row.querySelectorAll("a, summary")].filter((each) => each.closest("tr, details") === row);
  const rows = () => [...list.querySelectorAll(list.localName === "tbody" ? ":scope > tr" : ":scope > details")].filter((row) => inRow(row).length);
  const stop = (goal) => {
    list.querySelectorAll("[data-stop]").forEach((old) => { old.tabIndex = -1; delete old.dataset.stop; });
    goal.tabIndex = 0;
    goal.dataset.stop = "";
  };
  rows().forEach((row) => inRow(row).forEach((each) => { each.tabIndex = -1; }));
  const first = rows()[0];
  if (first) stop(inRow(first)[0]);
  list.addEventListener("focusin", (event) => {
    if (event.target.matches("a, summary") && inRow(event.target.closest("tr, details")).includes(event.target)) stop(event.target);
  });
  list.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr, details");
    const mine = row && row.parentElement === list ? inRow(row) : [];
    const column = mine.indexOf(event.target);
    if (column < 0) return;
    const all = rows();
    const at = all.indexOf(row);
    const goals = {
      ArrowDown: () => all[at + 1], ArrowUp: () => all[at - 1], Home: () => all[0], End: () => all[all.length - 1],
      ArrowRight: () => row, ArrowLeft: () => row,
    };
    const goal = goals[event.key]?.();
    if (!goal) return;
    const there = inRow(goal);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key] || 0;
    const next = there[Math.max(0, Math.min(column + step, there.length - 1))];
    event.preventDefault();
    stop(next);
    next.focus();
  });
}

// ---- search ---------------------------------------------------------------------------------

function search() {
  const input = byId("search");
  const list = byId("found");
  const most = 60;
  let index = null;
  let hits = [];
  let at = -1;

  const build = () => [...document.querySelectorAll("[data-find]")].map((element) => {
    const text = element.textContent.replace(/\s+/g, " ").trim();
    return { element, of: element.dataset.of || "", where: [element.dataset.find, element.dataset.of || ""].join(" "), kind: element.dataset.find, name: element.dataset.name, text, low: text.toLowerCase(), lowName: element.dataset.name.toLowerCase() };
  });

  const find = (words) => {
    const found = [];
    for (const each of index) {
      if (!words.every((word) => each.low.includes(word) || each.lowName.includes(word) || each.where.includes(word))) continue;
      const rank = each.lowName === words[0] ? 0 : each.lowName.startsWith(words[0]) ? 1 : each.lowName.includes(words[0]) ? 2 : 3;
      found.push([2 * rank + each.of.startsWith("joint"), each]);  // the joint graph repeats the others
    }
    return found.sort((a, b) => a[0] - b[0]).map((pair) => pair[1]);
  };

  const excerpt = (each, word) => {
    const start = each.text.startsWith(each.name) ? each.name.length : 0;
    const from = Math.max(start, each.low.indexOf(word, start) - 30);
    return each.of + (each.of && ": ") + (from > start ? "… " : "") + each.text.slice(from, from + 140);
  };

  const close = () => {
    list.hidden = true;
    at = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };

  const mark = (next) => {
    list.children[at]?.setAttribute("aria-selected", "false");
    at = next;
    const item = list.children[at];
    item.setAttribute("aria-selected", "true");
    item.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", item.id);
  };

  const go = (each) => {
    if (!each) return;
    close();
    if (location.hash === "#" + each.element.id) arrive();
    else location.hash = each.element.id;
  };

  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) { close(); return; }
    index ??= build();
    const all = find(words);
    hits = all.slice(0, most);
    list.replaceChildren(...hits.map((each, number) => {
      const item = document.createElement("li");
      item.id = "hit" + number;
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", "false");
      item.append(part("small", each.kind), part("div", "", part("code", each.name), part("small", excerpt(each, words[0]))));
      item.addEventListener("mousedown", (event) => { event.preventDefault(); go(each); });
      return item;
    }));
    if (!hits.length) {
      const none = part("li", "Nothing found.");
      none.className = "none";
      none.setAttribute("role", "option");
      none.setAttribute("aria-disabled", "true");
      list.append(none);
    }
    list.hidden = false;
    list.scrollTop = 0;
    at = -1;
    input.setAttribute("aria-expanded", "true");
    input.removeAttribute("aria-activedescendant");
    const shown = all.length > most ? `, ${most} of them shown` : "";
    say(all.length === 1 ? "1 result" : `${all.length} results${shown}`);
    if (hits.length) mark(0);
  };

  input.addEventListener("input", show);
  input.addEventListener("focus", () => { if (input.value) show(); });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (list.hidden) input.blur(); else close();
      event.preventDefault();
    } else if (event.key === "Enter") {
      go(hits[at]);
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && hits.length && !list.hidden) {
      event.preventDefault();
      mark((at + (event.key === "ArrowDown" ? 1 : -1) + hits.length) % hits.length);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}

function part(name, text, ...children) {
  const made = document.createElement(name);
  made.append(text, ...children);
  return made;
}

// ---- copying --------------------------------------------------------------------------------

async function copy(event) {
  const button = event.target.closest(".copy");
  if (!button) return;
  const code = button.closest(".block").querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {  // no clipboard for this page: select it, and let the browser copy
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// ---- colours of code ------------------------------------------------------------------------

const NAMES = {
  python: "and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield True False None",
  cpp: "alignas auto bool break case class const constexpr continue default do double else enum extern false float for if inline int int32_t int64_t long namespace new nullptr return signed sizeof static static_cast struct switch template this true typedef typename unsigned using void while",
};
NAMES.triton = NAMES.python;
const TOKENS = {
  python: /(#.*)|((?:\b[rbfuRBFU]{1,2})?(?:'''[^]*?(?:'''|$)|"""[^]*?(?:"""|$)|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))|(\b\d[\w.]*)|(\b[A-Za-z_]\w*)/g,
  cpp: /(\/\/.*|\/\*[^]*?\*\/|^\s*#.*$)|('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|(\b\d[\w.]*)|(\b[A-Za-z_]\w*)/gm,
};
TOKENS.triton = TOKENS.python;

// The text stays as it is: ranges of it are coloured. A listing of source is one text in many parts.
function paint(place) {
  if (!("highlights" in CSS)) return;
  if (place.hasAttribute("data-source")) colour(place.querySelectorAll(".line > code, .line > summary > code"), "python", "\n");
  else colour([place], place.dataset.language, "");
}

function colour(elements, language, joint) {
  const pieces = [];  // text nodes with where they start in the whole
  let whole = "";
  for (const element of elements) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      pieces.push([whole.length, node]);
      whole += node.data;
    }
    whole += joint;
  }
  const names = new Set(NAMES[language]?.split(" "));
  let at = 0;
  const mark = (kind, from, to) => {
    while (at + 1 < pieces.length && pieces[at + 1][0] <= from) at++;
    for (let k = at; k < pieces.length && pieces[k][0] < to; k++) {
      const [start, node] = pieces[k];
      const range = new StaticRange({
        startContainer: node, startOffset: Math.max(0, from - start),
        endContainer: node, endOffset: Math.min(node.length, to - start),
      });
      if (range.startOffset >= range.endOffset) continue;
      if (!CSS.highlights.has(kind)) CSS.highlights.set(kind, new Highlight());
      CSS.highlights.get(kind).add(range);
    }
  };
  for (const token of TOKENS[language] ? whole.matchAll(TOKENS[language]) : []) {
    const kind = token[1] ? "comment" : token[2] ? "string" : token[3] ? "number" : names.has(token[4]) ? "keyword" : null;
    if (kind) mark(kind, token.index, token.index + token[0].length);
  }
}
