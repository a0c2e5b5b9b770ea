// Figures one can touch, without a kernel: each <figure class="pcl-touch" data-kind="..."> carries its data as JSON and a
// sentence for readers without scripts. Sliders, selects and arrow keys do everything that a pointer does.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  let count = 0;

  function make(tag, words = {}, text = "") {
    const svg = ["svg", "path", "line", "circle", "text", "g"].includes(tag);
    const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(words)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    return node;
  }

  function short(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-2 || size >= 1e5)) return value.toExponential(1);
    return String(+value.toPrecision(3));
  }

  // A slider with its name and value before it; calls `changed` with the place it stands at.
  function slider(box, name, texts, start, changed) {
    const id = `pcl-touch-${++count}`;
    const line = make("div", { class: "pcl-slider" });
    const label = make("label", { for: id }, `${name}: `);
    const said = make("output", { for: id });
    const input = make("input", { id, type: "range", min: 0, max: texts.length - 1, step: 1, value: start });
    const tell = () => {
      said.textContent = texts[+input.value];
      input.setAttribute("aria-valuetext", texts[+input.value]);
    };
    input.addEventListener("input", () => { tell(); changed(); });
    tell();
    label.append(said);
    line.append(label, input);
    box.append(line);
    return () => +input.value;
  }

  function choice(box, name, values, changed) {
    const id = `pcl-touch-${++count}`;
    const label = make("label", { for: id }, `${name} `);
    const select = make("select", { id });
    for (const [value, text] of [["", "all"], ...values]) select.append(make("option", { value }, text));
    select.addEventListener("change", changed);
    label.append(select);
    box.append(label);
    return () => select.value;
  }

  // Curves over a logarithmic axis, chosen by sliders; the lowest point of the curve is marked.
  function curves(figure, data) {
    const W = 640, H = 330, left = 64, right = 16, top = 14, bottom = 46;
    const picture = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": data.alt });
    const told = make("p", { class: "pcl-told", "aria-live": "polite" });
    const box = make("div");
    figure.append(picture, box, told);
    const all = [...Object.values(data.curves), ...Object.values(data.reference || {})].flat();
    const low = Math.min(...all), high = Math.max(...all);
    const yOf = data.log ? Math.log : v => v;
    const span = (yOf(high) - yOf(low)) || 1;
    const [first, last] = [Math.log(data.x[0]), Math.log(data.x.at(-1))];
    const px = x => left + (Math.log(x) - first) / (last - first) * (W - left - right);
    const py = y => top + (yOf(high) - yOf(y)) / span * (H - top - bottom);
    const path = ys => ys.map((y, i) => `${i ? "L" : "M"}${px(data.x[i]).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    for (const x of data.ticks) {
      picture.append(make("line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: H - bottom }));
      picture.append(make("text", { x: px(x), y: H - bottom + 18, "text-anchor": "middle" }, String(x)));
    }
    for (let i = 0; i <= 4; i++) {
      const at = yOf(low) + span * i / 4, y = data.log ? Math.exp(at) : at;
      picture.append(make("line", { class: "grid", x1: left, x2: W - right, y1: py(y), y2: py(y) }));
      picture.append(make("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, short(y)));
    }
    picture.append(make("text", { x: (left + W - right) / 2, y: H - 8, "text-anchor": "middle" }, data.xlabel));
    picture.append(make("text", { x: 14, y: H / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${H / 2})` }, data.ylabel));
    picture.append(make("line", { class: "truth", x1: px(data.truth), x2: px(data.truth), y1: top, y2: H - bottom }));
    const reference = make("path", { class: "reference" }), line = make("path", { class: "curve" });
    const dot = make("circle", { class: "dot", r: 6 }), other = make("circle", { class: "other", r: 5 });
    picture.append(reference, line, other, dot);
    const places = data.sliders.map(s => slider(box, s.name, s.texts, s.start, draw));
    function best(ys) { return ys.indexOf(Math.min(...ys)); }
    function draw() {
      const at = places.map(place => place()), ys = data.curves[at.join(",")], i = best(ys);
      line.setAttribute("d", path(ys));
      dot.setAttribute("cx", px(data.x[i])); dot.setAttribute("cy", py(ys[i]));
      let text = `${data.says} ${short(data.x[i])}; the truth is ${short(data.truth)}.`;
      if (data.price) text += ` ${data.price} ${short(ys[i])} nats.`;
      const also = (data.reference || {})[at[data.reference_by ?? 0]];
      if (also) {
        const j = best(also);
        reference.setAttribute("d", path(also));
        other.setAttribute("cx", px(data.x[j])); other.setAttribute("cy", py(also[j]));
        text += ` ${data.reference_says} ${short(data.x[j])} (dashed).`;
      }
      told.textContent = text;
    }
    if (!data.reference) { reference.remove(); other.remove(); }
    draw();
  }

  // A credible cap on the sphere and the points inside it; arrow keys turn the sphere.
  function cap(figure, data) {
    const n = 520, r = 0.46 * n;
    const canvas = make("canvas", { width: n, height: n, tabindex: 0, role: "img", "aria-label": data.alt });
    const ctx = canvas.getContext("2d"), box = make("div");
    const told = make("p", { class: "pcl-told", "aria-live": "polite" });
    figure.append(canvas, box, told);
    let yaw = 0.4, pitch = 0.3;
    const kappas = data.kappas.map(String), levels = data.levels.map(v => `${Math.round(100 * v)} %`);
    const atKappa = slider(box, "concentration κ of the query", kappas, data.start[0], draw);
    const atLevel = slider(box, "probability of the cap", levels, data.start[1], draw);
    function turned([x, y, z]) {
      const [c, s] = [Math.cos(yaw), Math.sin(yaw)], [cp, sp] = [Math.cos(pitch), Math.sin(pitch)];
      const [a, b] = [c * x + s * z, -s * x + c * z];
      return [a, cp * y - sp * b, sp * y + cp * b];
    }
    function draw() {
      const colour = getComputedStyle(figure), ink = colour.color;
      const k = data.kappas[atKappa()], p = data.levels[atLevel()];
      const t = 1 + Math.log1p(-p * -Math.expm1(-2 * k)) / k;  // P(cos >= t) = p in three dimensions
      ctx.clearRect(0, 0, n, n);
      ctx.strokeStyle = ink; ctx.globalAlpha = 0.5; ctx.lineWidth = 1.2;
      ctx.beginPath(); ctx.arc(n / 2, n / 2, r, 0, 7); ctx.stroke();
      const sine = Math.sqrt(1 - t * t), ring = [];
      for (let i = 0; i <= 120; i++) {
        const a = i / 60 * Math.PI;
        ring.push(turned([sine * Math.cos(a), sine * Math.sin(a), t]));
      }
      ctx.globalAlpha = 1; ctx.lineWidth = 2.5; ctx.strokeStyle = "#c1440e";
      for (let i = 0; i < 120; i++) {
        ctx.globalAlpha = ring[i][2] > 0 ? 1 : 0.25;
        ctx.beginPath();
        ctx.moveTo(n / 2 + r * ring[i][0], n / 2 - r * ring[i][1]);
        ctx.lineTo(n / 2 + r * ring[i + 1][0], n / 2 - r * ring[i + 1][1]);
        ctx.stroke();
      }
      let inside = 0;
      const kinds = new Set();
      data.points.forEach((point, i) => {
        const member = point[2] >= t, [x, y, z] = turned(point);
        if (member) { inside++; kinds.add(data.labels[i]); }
        ctx.globalAlpha = z > 0 ? 1 : 0.25;
        ctx.fillStyle = member ? "#c1440e" : ink;
        ctx.beginPath(); ctx.arc(n / 2 + r * x, n / 2 - r * y, member ? 5 : 3, 0, 7);
        if (member) ctx.fill(); else { ctx.globalAlpha *= 0.6; ctx.fill(); }
      });
      ctx.globalAlpha = 1;
      const angle = Math.acos(Math.max(-1, t)) * 180 / Math.PI;
      told.textContent = `The cap reaches ${angle.toFixed(0)} degrees from the mode and has ${inside} of ${data.points.length} `
        + `members, of ${kinds.size} ${kinds.size === 1 ? "kind" : "kinds"}.`;
    }
    canvas.addEventListener("pointermove", e => {
      if (e.buttons) { yaw += e.movementX / 120; pitch += e.movementY / 120; draw(); } });
    canvas.addEventListener("keydown", e => {
      const steps = { ArrowLeft: [-.1, 0], ArrowRight: [.1, 0], ArrowUp: [0, -.1], ArrowDown: [0, .1] };
      const step = steps[e.key];
      if (step) { e.preventDefault(); yaw += step[0]; pitch += step[1]; draw(); } });
    new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    draw();
  }

  // Every published number, by work, claim, verdict and cause.
  function filter(figure, data) {
    const SHOWN = 25, box = make("div", { class: "pcl-filters" });
    const told = make("p", { class: "pcl-told", "aria-live": "polite" });
    const place = make("div", { class: "pcl-scroll", tabindex: 0, role: "region", "aria-label": data.alt });
    const more = make("button", { type: "button" }, "Show all of them");
    const unique = key => [...new Set(data.rows.flatMap(row => row[key]))].filter(v => v);
    let whole = false;
    const changed = () => { whole = false; draw(); };
    const chosen = {
      work: choice(box, "Work", unique("work").map(v => [v, data.works[v] || v]), changed),
      claims: choice(box, "Claim", unique("claims").map(v => [v, data.claims[v] || v]), changed),
      verdict: choice(box, "Verdict", unique("verdict").map(v => [v, v]), changed),
      cause: choice(box, "Cause", unique("cause").map(v => [v, v]), changed),
    };
    figure.append(box, told, place, more);
    more.addEventListener("click", () => { whole = true; draw(); });
    function draw() {
      const found = data.rows.filter(row => Object.entries(chosen).every(([key, value]) => {
        const wanted = value();
        return !wanted || [row[key]].flat().includes(wanted);
      }));
      const table = make("table", { class: "table pcl-cards" }), head = make("tr"), body = make("tbody");
      const names = ["number", "published", "ours", "verdict", "why"];
      for (const name of names) head.append(make("th", { scope: "col" }, name));
      for (const row of whole ? found : found.slice(0, SHOWN)) {
        const line = make("tr"), first = make("th", { scope: "row" });
        first.append(make("a", { href: `${row.chapter}.html` }, row.name));
        line.append(first);
        for (const [i, key] of ["paper", "ours", "verdict", "why"].entries())
          line.append(make("td", { "data-label": names[i + 1] }, row[key] || "–"));
        body.append(line);
      }
      const top = make("thead");
      top.append(head);
      table.append(top, body);
      place.replaceChildren(table);
      more.hidden = whole || found.length <= SHOWN;
      told.textContent = `${found.length} of ${data.rows.length} published cells` + (more.hidden ? "." : `, the first ${SHOWN} shown.`);
    }
    draw();
  }

  const KINDS = { curves, cap, filter };
  for (const figure of document.querySelectorAll("figure.pcl-touch")) {
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    figure.querySelector(".pcl-still")?.remove();
    KINDS[figure.dataset.kind](figure, data);
  }
})();
