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
  function fit() {
    const formulas = [...document.querySelectorAll("article mjx-container")].filter(f => f.querySelector("svg"));
    for (const formula of formulas) formula.style.removeProperty("font-size");
    if (innerWidth > 600) return;
    const rooms = formulas.map(f => (f.clientWidth + 1) / f.querySelector("svg").getBoundingClientRect().width);
    const sizes = formulas.map(f => parseFloat(getComputedStyle(f).fontSize));
    formulas.forEach((formula, i) => {
      if (rooms[i] < 1 && formula.clientWidth) formula.style.fontSize = `${Math.max(LEAST, 0.99 * rooms[i]) * sizes[i]}px`;
    });
  }
  addEventListener("resize", fit);
  addEventListener("load", () => window.MathJax?.startup?.promise?.then(fit));
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
