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

  // A drawing is as wide as its place, so that its type has the size that the style sheet says.
  function drawnWidth(figure) { return Math.min(640, Math.max(320, figure.clientWidth || 640)); }

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
    const place = () => +input.value;
    place.move = at => { input.value = at; tell(); changed(); };
    return place;
  }

  function outline(angles, radius, mid) {
    return angles.map((a, i) => {
      const r = radius(a);
      return `${i ? "L" : "M"}${(mid + r * Math.cos(a)).toFixed(2)} ${(mid - r * Math.sin(a)).toFixed(2)}`;
    }).join("");
  }

  const span = (from, to, count) => Array.from({ length: count + 1 }, (_, i) => from + (to - from) * i / count);

  // Round numbers for an axis: 1, 2 or 5 times a power of ten.
  function levels(low, high, log) {
    const power = Math.floor(Math.log10(log ? low : (high - low) / 5));
    const round = span(power, power + 20, 20).flatMap(p => [1, 2, 5].map(n => +`${n}e${p}`));
    if (log) {
      const inside = round.filter(y => y >= low && y <= high);
      return inside.length > 7 ? inside.filter(y => String(y.toExponential()).startsWith("1e")) : inside;
    }
    const step = round.find(y => y >= (high - low) / 5), first = Math.ceil(low / step);
    return span(first, Math.floor(high / step), Math.floor(high / step) - first).map(i => +(i * step).toPrecision(12));
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
    const W = drawnWidth(figure), H = 330, left = 64, right = 16, top = 14, bottom = 46;
    const picture = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": data.alt });
    const told = make("p", { class: "pcl-told", "aria-live": "polite" });
    const box = make("div");
    figure.append(picture, box, told);
    const all = [...Object.values(data.curves), ...Object.values(data.reference || {})].flat();
    const low = Math.min(...all), high = Math.max(...all);
    const yOf = data.log ? Math.log : v => v;
    const range = (yOf(high) - yOf(low)) || 1;
    const [first, last] = [Math.log(data.x[0]), Math.log(data.x.at(-1))];
    const px = x => left + (Math.log(x) - first) / (last - first) * (W - left - right);
    const py = y => top + (yOf(high) - yOf(y)) / range * (H - top - bottom);
    const path = ys => ys.map((y, i) => `${i ? "L" : "M"}${px(data.x[i]).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    for (const x of data.ticks) {
      picture.append(make("line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: H - bottom }));
      picture.append(make("text", { x: px(x), y: H - bottom + 18, "text-anchor": "middle" }, String(x)));
    }
    for (const y of levels(low, high, data.log)) {
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

  // Posteriors on the circle while they train: a panel for each training, one slider for how far it is.
  function circle(figure, data) {
    const n = 300, mid = n / 2, R = 82, count = data.trainings[0].frames.length;
    const row = make("div", { class: "pcl-panels" }), box = make("div");
    const told = make("p", { class: "pcl-told", "aria-live": "polite" });
    const play = make("button", { type: "button" }, "Play");
    // Heights grow more slowly than densities, so that a sharp posterior stays in the picture.
    const bump = (angle, kappa) => {
      const half = Math.min(Math.PI, 6 / Math.sqrt(kappa)), peak = Math.sqrt(kappa / (2 * Math.PI));
      return outline(span(angle - half, angle + half, 80), a => {
        const density = peak * Math.exp(kappa * (Math.cos(a - angle) - 1));
        return R * (1 + 0.75 * density / (2 + density));
      }, mid);
    };
    const at = (angle, r) => [mid + r * Math.cos(angle), mid - r * Math.sin(angle)];
    const panels = data.trainings.map(training => {
      const picture = make("svg", { viewBox: `0 0 ${n} ${n}`, role: "img", "aria-label": `${training.name}: ${data.alt}` });
      const part = make("div"), moving = make("g");
      picture.append(make("circle", { class: "ring", cx: mid, cy: mid, r: R }));
      for (const i of data.drawn) picture.append(make("path", { class: "true", d: bump(data.angle[i], data.kappa[i]) }));
      for (const angle of data.angle) {
        const [[x1, y1], [x2, y2]] = [at(angle, R - 14), at(angle, R - 6)];
        picture.append(make("line", { class: "tick", x1, y1, x2, y2 }));
      }
      picture.append(moving);
      part.append(make("p", { class: "pcl-panel" }, training.name), picture);
      row.append(part);
      return moving;
    });
    figure.append(row, box, told);
    const texts = span(0, 1, count - 1).map(share => `${Math.round(100 * share)} % of the steps`);
    const place = slider(box, "training", texts, count - 1, draw);
    box.append(play);
    let timer = null;
    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
      told.setAttribute("aria-live", "polite");
    }
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (place() === count - 1) place.move(0);
      play.textContent = "Pause";
      told.setAttribute("aria-live", "off");  // a screen reader need not read every step
      timer = setInterval(() => { if (place() < count - 1) place.move(place() + 1); else stop(); }, 250);
    });
    function draw() {
      const now = place(), words = [];
      data.trainings.forEach((training, k) => {
        const [angles, kappas] = training.frames[now], [arc, level, rank] = training.told[now];
        panels[k].replaceChildren();
        data.drawn.forEach((i, hue) => panels[k].append(make("path", { class: `hue${hue}`, d: bump(angles[i], kappas[i]) })));
        for (const angle of angles) {
          const [cx, cy] = at(angle, R);
          panels[k].append(make("circle", { class: "mean", cx, cy, r: 2.5 }));
        }
        words.push(`${training.name}, step ${training.steps[now]}: an arc of ${Math.round(arc)} degrees, median κ̂ ${short(level)}, `
          + `rank correlation ${rank.toFixed(2)}.`);
      });
      const [arc, level] = data.truth;
      told.textContent = `${words.join(" ")} The truth: ${Math.round(arc)} degrees, median κ ${short(level)}.`;
    }
    draw();
  }

  // A posterior in two worlds whose inputs have the same table of pair ratios, and what anchors with one mode see of it.
  function anchors(figure, data) {
    const n = 300, mid = n / 2, R = 84, W = 320, H = 300, left = 44, right = 20, top = 12, bottom = 44, turn = Math.PI / 180;
    const sum = (coefficients, t) => coefficients.reduce((all, c, l) => all + c * Math.cos(l * t), 0);
    const parts = (world, v, by, sign) =>
      world.angles.map((angle, j) => world.weights[j] * sum(data.ratio, v - by - sign * angle));
    const ratio = (world, v, by = 0, sign = 1) => parts(world, v, by, sign).reduce((a, b) => a + b);
    const density = (world, t, by, sign) =>
      world.angles.reduce((all, angle, j) => all + world.weights[j] * sum(data.density, t - by - sign * angle), 0);
    const [one, two] = data.worlds, round = span(-Math.PI, Math.PI, 180);
    const row = make("div", { class: "pcl-panels" }), box = make("div");
    const told = make("p", { class: "pcl-told", "aria-live": "polite" });
    const drawing = make("svg", { viewBox: `0 0 ${n} ${n}`, role: "img", "aria-label": data.alt });
    const plot = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": data.plot });
    for (const [name, picture] of [["the posterior of one input", drawing], ["its pair ratio with an anchor", plot]]) {
      const part = make("div");
      part.append(make("p", { class: "pcl-panel" }, name), picture);
      row.append(part);
    }
    figure.append(row, box, told);
    const high = 1.15 * Math.max(...round.flatMap(t => [ratio(one, t), ratio(two, t)]));
    const px = t => left + (t / (2 * Math.PI) + 0.5) * (W - left - right), py = y => top + (1 - y / high) * (H - top - bottom);
    const path = f => round.map((t, i) => `${i ? "L" : "M"}${px(t).toFixed(1)} ${py(f(t)).toFixed(1)}`).join("");
    const bump = (world, by, sign) => outline(round, t => R * (1 + 1.1 * density(world, t, by, sign)), mid);
    for (const degrees of [-180, -90, 0, 90, 180]) {
      const x = px(degrees * turn);
      plot.append(make("line", { class: "grid", x1: x, x2: x, y1: top, y2: H - bottom }));
      plot.append(make("text", { x, y: H - bottom + 16, "text-anchor": "middle" }, `${degrees}°`));
    }
    for (let y = 0; y < high; y++) {
      plot.append(make("line", { class: "grid", x1: left, x2: W - right, y1: py(y), y2: py(y) }));
      plot.append(make("text", { x: left - 6, y: py(y) + 4, "text-anchor": "end" }, String(y)));
    }
    plot.append(make("text", { x: (left + W - right) / 2, y: H - 8, "text-anchor": "middle" }, "anchor at"));
    plot.append(make("text", { x: 12, y: H / 2 - 16, "text-anchor": "middle", transform: `rotate(-90 12 ${H / 2 - 16})` }, "pair ratio S h"));
    drawing.append(make("circle", { class: "ring", cx: mid, cy: mid, r: R }));
    one.angles.forEach((angle, j) =>
      plot.append(make("path", { class: "part", d: path(t => one.weights[j] * sum(data.ratio, t - angle)) })));
    plot.append(make("path", { class: "curve", d: path(t => ratio(one, t)) }));
    drawing.append(make("path", { class: "curve", d: bump(one, 0, 1) }));
    const others = [drawing, plot].map(picture => picture.appendChild(make("path", { class: "reference" })));
    const marks = [drawing, plot].map(picture => picture.appendChild(make("g")));
    const counts = Array.from({ length: data.most + 1 }, (_, i) => String(i));
    const starts = Array.from({ length: 36 }, (_, i) => 10 * i - 180);
    const many = slider(box, "anchors on an arc of 90°", counts, data.start[0], draw);
    const where = slider(box, "the first anchor at", starts.map(v => `${v}°`), starts.indexOf(data.start[1]), draw);
    // The turn, or mirror image and turn, of world 2 that comes nearest to what all anchors see of world 1.
    function nearest(places) {
      const seen = places.map(v => ratio(one, v));
      const off = (by, sign) => Math.max(...places.map((v, i) => Math.abs(ratio(two, v, by, sign) - seen[i])));
      let best = [Infinity, 0, 1];
      const look = (turns, signs) => {
        for (const sign of signs) for (const by of turns) {
          const gap = off(by, sign);
          if (gap < best[0]) best = [gap, by, sign];
        }
      };
      look(span(-Math.PI, Math.PI, 720), [1, -1]);
      for (const width of [0.5, 0.02]) look(span(best[1] - width * turn, best[1] + width * turn, 40), [best[2]]);
      return best;
    }
    function draw() {
      const count = many(), first = starts[where()];
      const places = count < 2 ? [first * turn].slice(0, count) : span(first * turn, (first + 90) * turn, count - 1);
      const [gap, by, sign] = count ? nearest(places) : [0, 0, 1];
      others[0].setAttribute("d", bump(two, by, sign));
      others[1].setAttribute("d", path(t => ratio(two, t, by, sign)));
      marks.forEach(mark => mark.replaceChildren());
      for (const v of places) {
        const inside = ((v + Math.PI) % (2 * Math.PI) + 2 * Math.PI) % (2 * Math.PI) - Math.PI;
        marks[0].append(make("circle", { class: "mean", cx: mid + R * Math.cos(v), cy: mid - R * Math.sin(v), r: 5 }));
        marks[1].append(make("circle", { class: "mean", cx: px(inside), cy: py(ratio(one, v)), r: 5 }));
      }
      if (!count) {
        told.textContent = "Without anchors there is nothing to see: paired with their like, the inputs of both worlds have the same ratios.";
        return;
      }
      const each = parts(one, places[0], 0, 1);
      told.textContent = `The first anchor sees ${ratio(one, places[0]).toFixed(2)}, of which the three modes give `
        + `${each.map(v => v.toFixed(2)).join(", ")}. However world 2 is turned or mirrored, it is off by ${short(Math.round(1e4 * gap) / 1e4)} or more at some `
        + (gap < 1e-3 ? "anchor: nothing rules it out." : gap < 0.02 ? "anchor: it takes many pairs to see that." : "anchor: it is ruled out.");
    }
    draw();
  }

  // Every published number, by work, claim, verdict and cause.
  function filter(figure, data) {
    const SHOWN = 10, box = make("div", { class: "pcl-filters" });
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

  const KINDS = { curves, cap, circle, anchors, filter };
  for (const figure of document.querySelectorAll("figure.pcl-touch")) {
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    figure.querySelector(".pcl-still")?.remove();
    KINDS[figure.dataset.kind](figure, data);
  }
})();
