// A bar a request: queue, prefill with its chunks, decode, preempted, swapped; a line at the step, which a drag moves.

const STATE_NAMES = ["queue", "prefill", "decode", "preempted", "swapped"];
const AXIS = 22, LABELS = 118;

async function render({ model, el }) {
  const { root, theme } = frame(el);
  const meta = model.get("meta");
  if (meta.message) { message(root, meta.message); return; }
  const data = await unpack(model.get("data"), meta.layout), colors = [theme.queue, theme.prefill, theme.decode, theme.preempted, theme.swapped];
  const num = meta.requests.length, tall = Math.max(3, Math.min(18, Math.floor(480 / num)));
  const [from, to] = span(data);
  const cursor = new Cursor(model, meta.num_steps, draw);
  const bar = scrubber(cursor, step => `step ${count(step)} of ${count(meta.num_steps - 1)}`);
  const body = canvas(num * tall, { tabindex: 0, role: "img", "aria-label": meta.title, "data-lm-suppress-shortcuts": "true" });
  const axis = canvas(AXIS, { "aria-hidden": "true" });
  const told = h("div", { class: "kvlab-status" }), scroll = h("div", { class: "kvlab-scroll" }, body.node);
  const seen = STATE_NAMES.map((name, i) => [name, colors[i], data.state.includes(i)]).filter(x => x[2]);
  root.append(h("div", { class: "kvlab-head" }, h("div", { class: "kvlab-title", role: "heading", "aria-level": "3" }, meta.title), h("span", { class: "kvlab-sub" }, plural(num, "request"))),
    h("div", { class: "kvlab-legend" }, ...seen.map(([name, color]) => h("span", { class: "kvlab-key" }, h("i", { style: `background:${color}` }), name))),
    scroll, axis.node, told, bar.node, ...meta.notes.map(note => h("p", { class: "kvlab-note" }, note)));
  let picture = null, left = 0, width = 0, hover = null, pending = 0;
  const x = s => left + (s - from) / (to - from || 1) * (width - left - 2);

  function lay(now) {
    width = now - 18; // room for a scroll bar
    left = tall >= 12 ? LABELS : 4;
    body.fit(width, num * tall);
    axis.fit(width, AXIS);
    bars();
    ticks();
    draw();
  }
  function bars() { // drawn once, copied in each frame
    picture = document.createElement("canvas");
    Object.assign(picture, { width: body.node.width, height: body.node.height });
    const c = picture.getContext("2d"), ratio = picture.width / width, inner = tall > 5 ? tall - 2 : tall;
    c.scale(ratio, ratio);
    for (let i = 0; i < data.row.length; i++) {
      const a = x(data.start[i]), b = x(data.stop[i]), y = data.row[i] * tall, state = data.state[i];
      c.fillStyle = colors[state];
      c.fillRect(a, y, Math.max(0.6, b - a), inner);
      if (state >= 3 && tall > 5) hatch(c, a, y, b - a, inner, state === 3 ? 1 : -1);
    }
    c.fillStyle = theme.paper;
    for (let i = 0; i < data.chunk_row.length; i++) c.fillRect(x(data.chunk_s[i]) - 0.5, data.chunk_row[i] * tall, 1, inner);
    for (let i = 0; i < num; i++) if (!["stop", "length"].includes(meta.reasons[i])) mark(c, x(data.finish[i]), i * tall + inner / 2);
    if (left < LABELS) return;
    c.fillStyle = theme.ink;
    c.font = '11px "DejaVu Sans", Verdana, sans-serif';
    c.textBaseline = "middle";
    c.textAlign = "right";
    meta.requests.forEach((name, i) => c.fillText(name.length > 17 ? name.slice(0, 16) + "…" : name, left - 8, i * tall + inner / 2));
  }
  function hatch(c, a, y, wide, high, way) {
    c.save();
    c.beginPath();
    c.rect(a, y, wide, high);
    c.clip();
    c.strokeStyle = theme.paper;
    c.globalAlpha = 0.55;
    c.beginPath();
    for (let i = Math.floor(a / 6) * 6 - high; i < a + wide + high; i += 6) { c.moveTo(i, way > 0 ? y + high : y); c.lineTo(i + high, way > 0 ? y : y + high); }
    c.stroke();
    c.restore();
  }
  function mark(c, at, y) {
    c.strokeStyle = theme.ink;
    c.beginPath();
    for (const way of [1, -1]) { c.moveTo(at - 3, y - 3 * way); c.lineTo(at + 3, y + 3 * way); }
    c.stroke();
  }
  function ticks() {
    const { context: c } = axis, rough = (to - from) / Math.max(2, (width - left) / 110), unit = 10 ** Math.floor(Math.log10(rough || 1));
    const apart = [1, 2, 5, 10].map(k => k * unit).find(k => k >= rough) || 1, digits = Math.max(0, -Math.floor(Math.log10(apart)));
    c.clearRect(0, 0, width, AXIS);
    c.fillStyle = theme.soft;
    c.font = '11px "DejaVu Sans", Verdana, sans-serif';
    c.fillRect(left, 0, width - left, 1);
    c.textAlign = "center";
    for (let s = Math.ceil(from / apart) * apart; s <= to; s += apart) {
      const at = x(s);
      c.fillRect(at, 0, 1, 4);
      if (at < width - 30) c.fillText(`${s.toFixed(digits)} s`, Math.max(at, left + 12), 16);
    }
  }
  function draw() { if (!pending) pending = requestAnimationFrame(() => { pending = 0; paint(); }); }
  function paint() {
    if (!picture) return;
    const { context: c } = body, high = num * tall, at = x(data.end_s[cursor.step]);
    c.clearRect(0, 0, width, high);
    if (hover) { c.fillStyle = theme.panel; c.fillRect(0, hover.row * tall - 1, width, tall); }
    c.drawImage(picture, 0, 0, width, high);
    c.fillStyle = theme.ink;
    c.fillRect(at - 1, 0, 2, high);
    told.textContent = hover ? hover.text : `${data.end_s[cursor.step].toFixed(3)} s  ·  ${states(data.end_s[cursor.step])}`;
    bar.update();
  }
  function states(s) { // how many requests are in each state
    const found = new Array(STATE_NAMES.length).fill(0);
    for (let i = 0; i < data.row.length; i++) if (data.start[i] <= s && s < data.stop[i]) found[data.state[i]]++;
    return found.map((n, i) => n ? `${n} in ${STATE_NAMES[i]}` : "").filter(Boolean).join(", ") || "no request is there";
  }
  function nearest(s) { // the first step that ends at or after a time
    let low = 0, high = meta.num_steps - 1;
    while (low < high) { const m = (low + high) >> 1; if (data.end_s[m] >= s) high = m; else low = m + 1; }
    return low;
  }
  function point(event) {
    const box = body.node.getBoundingClientRect(), px = event.clientX - box.left, row = Math.floor((event.clientY - box.top) / tall);
    const s = from + (px - left) / (width - left - 2) * (to - from);
    if (event.buttons) { bar.pause(); cursor.go(nearest(s)); }
    hover = null;
    if (row >= 0 && row < num) {
      const i = data.row.findIndex((r, k) => r === row && data.start[k] <= s && s < data.stop[k]);
      const part = i < 0 ? "" : `${STATE_NAMES[data.state[i]]} ${(data.stop[i] - data.start[i]).toFixed(3)} s (${data.start[i].toFixed(3)} to ${data.stop[i].toFixed(3)} s)  ·  `;
      hover = { row, text: `${meta.requests[row]}:  ${part}${meta.facts[row]}` };
    }
    draw();
  }
  body.node.addEventListener("pointermove", point);
  body.node.addEventListener("pointerdown", event => { body.node.setPointerCapture(event.pointerId); point(event); });
  body.node.addEventListener("pointerleave", () => { hover = null; draw(); });
  body.node.addEventListener("keydown", event => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    cursor.go(cursor.step + by);
  });
  const stop = onWidth(root, lay);
  root.kvlab = { cursor };
  return () => { stop(); bar.pause(); cursor.close(); cancelAnimationFrame(pending); };
}

function span(data) {
  let from = Infinity, to = -Infinity;
  for (const s of data.arrival) from = Math.min(from, s);
  for (const s of data.finish) if (!Number.isNaN(s)) to = Math.max(to, s);
  for (const s of data.end_s) to = Math.max(to, s);
  return [from, to];
}

export default themed(render);
