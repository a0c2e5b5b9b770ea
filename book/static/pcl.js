// Definitions and references on hover and on focus: links to the glossary and the bibliography carry them as titles.
(() => {
  let tip = null;
  const hide = () => { tip?.remove(); tip = null; };
  function show(link) {
    hide();
    tip = document.createElement("div");
    tip.className = "pcl-tip";
    tip.id = "pcl-tip";
    tip.setAttribute("role", "tooltip");
    tip.textContent = link.dataset.tip;
    document.body.append(tip);
    const at = link.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const above = at.bottom + own.height + 12 > innerHeight;
    const left = Math.max(8, Math.min(at.left, innerWidth - own.width - 8));
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${scrollY + (above ? at.top - own.height - 6 : at.bottom + 6)}px`;
    link.setAttribute("aria-describedby", "pcl-tip");
  }
  for (const link of document.querySelectorAll("article a.reference.internal[title]")) {
    link.dataset.tip = link.title;
    link.removeAttribute("title");
    link.addEventListener("mouseenter", () => show(link));
    link.addEventListener("focus", () => show(link));
    link.addEventListener("mouseleave", hide);
    link.addEventListener("blur", hide);
  }
  addEventListener("keydown", e => { if (e.key === "Escape") hide(); });
})();

// On a phone a formula wider than its line is set in smaller type, down to two thirds; what is wider still scrolls.
(() => {
  const LEAST = 2 / 3;
  function room(formula) { // a formula within a line is as wide as it is drawn: the paragraph around it knows
    if (formula.hasAttribute("display")) return formula.clientWidth;
    let box = formula.parentElement;
    while (getComputedStyle(box).display.startsWith("inline")) box = box.parentElement;
    const style = getComputedStyle(box);
    return box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  }
  function fit() {
    const formulas = [...document.querySelectorAll("article mjx-container")].filter(f => f.querySelector("svg"));
    for (const formula of formulas) {
      formula.style.removeProperty("font-size");
      formula.classList.remove("pcl-wide");
    }
    if (innerWidth > 600) return;
    const widths = formulas.map(f => f.querySelector("svg").getBoundingClientRect().width);
    const shares = formulas.map((f, i) => widths[i] ? (room(f) + 1) / widths[i] : 1);
    const sizes = formulas.map(f => parseFloat(getComputedStyle(f).fontSize));
    formulas.forEach((formula, i) => {
      if (shares[i] >= 1 || shares[i] <= 0) return;
      formula.style.fontSize = `${Math.max(LEAST, 0.99 * shares[i]) * sizes[i]}px`;
      formula.classList.toggle("pcl-wide", 0.99 * shares[i] < LEAST && !formula.hasAttribute("display"));
    });
  }
  addEventListener("resize", fit);
  addEventListener("load", () => window.MathJax?.startup?.promise?.then(fit));
})();

// Printed lines that wrap go on indented (pcl.css): for that each line is an element. On a phone printed columns get
// smaller type, down to nine pixels, if their lines then fit.
(() => {
  const LEAST = 9;
  function part(box) {
    if (box.querySelector(":scope > :not(span:empty)") || !box.textContent.trim().includes("\n")) return;
    const lines = box.textContent.match(/.*\n|.+/g).map(text => {
      const line = document.createElement("span");
      line.className = "pcl-line";
      line.textContent = text;
      return line;
    });
    box.replaceChildren(...lines);
  }
  for (const box of document.querySelectorAll("article .cell_output pre")) part(box);
  function fit() {
    const boxes = [...document.querySelectorAll("article .cell_output pre")];
    for (const box of boxes) box.style.removeProperty("font-size");
    if (innerWidth > 600) return;
    const ruler = document.createElement("canvas").getContext("2d");
    for (const box of boxes) {
      const lines = box.textContent.split("\n");
      if (!box.clientWidth || lines.filter(line => /\S {2,}\S/.test(line)).length < 2) continue;
      const style = getComputedStyle(box);
      ruler.font = `${style.fontSize} ${style.fontFamily}`;
      const longest = Math.max(...lines.map(line => ruler.measureText(line).width));
      const room = box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
      const size = 0.99 * parseFloat(style.fontSize) * room / longest;
      if (longest > room && size >= LEAST) box.style.fontSize = `${size}px`;
    }
  }
  addEventListener("resize", fit);
  addEventListener("load", fit);
  document.addEventListener("toggle", fit, true);
})();

// What scrolls sideways can be reached and scrolled from the keyboard.
(() => {
  const boxes = "pre, .pcl-light, .pcl-dark, .pcl-scroll, .output.text_html, .output.text_html > div, div.math, mjx-container, .pst-scrollable-table-container";
  function mark() {
    for (const box of document.querySelectorAll(boxes)) {
      const wide = box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== "visible";
      if (wide && !box.hasAttribute("tabindex")) {
        box.tabIndex = 0;
        box.dataset.reachable = "";
      } else if (!wide && "reachable" in box.dataset) {
        box.removeAttribute("tabindex");
        delete box.dataset.reachable;
      }
    }
  }
  addEventListener("load", mark);
  addEventListener("resize", mark);
  new MutationObserver(mark).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  document.addEventListener("toggle", mark, true); // what was folded has a width now
  window.MathJax?.startup?.promise?.then(mark);
})();

// A link to something folded opens it, and so does paper.
(() => {
  function open() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    let opened = false;
    for (let at = target; at; at = at.parentElement) {
      if (at.tagName === "DETAILS" && !at.open) opened = at.open = true;
    }
    if (opened) target.scrollIntoView();
  }
  addEventListener("load", open);
  addEventListener("hashchange", open);
  document.addEventListener("click", e => {
    if (e.target.closest?.("a[href^='#']")?.hash === location.hash) open();
  });
  addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("article details")) fold.open = true;
  });
})();
