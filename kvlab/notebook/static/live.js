// A run as it goes: the pool in bands, output tokens a second, numbers of the moment, and a button that stops it.

const COLUMNS = ["end_s", "step_s", "used", "evictable", "free", "watermark", "running", "waiting", "swapped", "output", "prompt"];

function render({ model, el }) {
  const { root, theme } = frame(el);
  const memory = canvas(150, { role: "img", "aria-label": "KV blocks over time" }), speed = canvas(90, { role: "img", "aria-label": "output tokens a second over time" });
  const state = h("span", { class: "kvlab-sub", role: "status" });
  const stop = h("button", { type: "button", class: "kvlab-stop", onclick: press }, "■ stop");
  const tiles = Object.fromEntries(["step", "time", "running", "waiting", "swapped", "ended", "preemptions", "KV in use", "output tokens/s"].map(name => [name, h("b", {}, "–")]));
  const legend = [["used", theme.used], ["cached", theme.cached], ["free", theme.free], ["watermark", theme.warn]].map(([name, color]) => h("span", { class: "kvlab-key" }, h("i", { style: `background:${color}` }), name));
  root.append(h("div", { class: "kvlab-head" }, h("div", { class: "kvlab-title", role: "heading", "aria-level": "3" }, "Live run"), state, h("span", { class: "kvlab-spacer" }), stop),
    h("div", { class: "kvlab-tiles" }, ...Object.entries(tiles).map(([name, node]) => h("div", {}, node, h("span", {}, name)))),
    h("div", { class: "kvlab-legend" }, ...legend), memory.node, h("div", { class: "kvlab-tier" }, "output tokens a second"), speed.node);
  let width = 0, pending = 0, unheard = 0;

  function press() {
    model.set("stop", true);
    model.save_changes();
    stop.disabled = true;
    stop.textContent = "stopping …";
    clearTimeout(unheard);
    unheard = setTimeout(() => { unheard = -1; draw(); }, 5000); // other front ends hear a widget only when the cell has ended
  }

  function points() {
    const status = model.get("status"), data = model.get("data"), num = status.num_points ?? 0;
    if (!num || data.byteLength !== num * COLUMNS.length * 4) return null; // status and data come one after the other
    const bytes = new Uint8Array(data.buffer ?? data, data.byteOffset ?? 0, data.byteLength).slice();
    const all = new Float32Array(bytes.buffer);
    return Object.fromEntries(COLUMNS.map((name, i) => [name, all.subarray(i * num, (i + 1) * num)]));
  }
  function draw() { if (!pending) pending = requestAnimationFrame(() => { pending = 0; paint(); }); }
  function paint() {
    const status = model.get("status"), p = points();
    state.textContent = status.state ?? "";
    const over = !["running", "no step at the moment", "waiting for the first step"].includes(status.state);
    stop.disabled = over || model.get("stop");
    if (over) { stop.textContent = "■ stop"; clearTimeout(unheard); unheard = 0; }
    if (unheard === -1) state.textContent = "the kernel does not hear the button while a cell runs: interrupt it (■ in the notebook's toolbar)";
    if (!p) return;
    const show = { step: count(status.step), time: `${status.end_s.toFixed(1)} s`, running: count(status.running), waiting: count(status.waiting), swapped: count(status.swapped),
      ended: count(status.ended), preemptions: count(status.preemptions), "KV in use": `${(100 * status.usage).toFixed(0)} %`, "output tokens/s": count(Math.round(status.tokens_per_s)) };
    for (const [name, text] of Object.entries(show)) tiles[name].textContent = text;
    bands(p, status.total);
    line(p);
  }
  function place(p) { const from = p.end_s[0] - p.step_s[0], to = p.end_s[p.end_s.length - 1]; return s => (s - from) / (to - from || 1) * width; }
  function bands(p, total) {
    const { context: c, height } = memory, x = place(p), y = v => v / (total || 1) * height;
    c.fillStyle = theme.free;
    c.fillRect(0, 0, width, height);
    for (let i = 0; i < p.used.length; i++) {
      const a = Math.floor(x(i ? p.end_s[i - 1] : p.end_s[0] - p.step_s[0])), w = Math.ceil(x(p.end_s[i])) - a; // whole pixels: no seams
      c.fillStyle = theme.used;
      c.fillRect(a, height - y(p.used[i]), w, y(p.used[i]));
      c.fillStyle = theme.cached;
      c.fillRect(a, height - y(p.used[i] + p.evictable[i]), w, y(p.evictable[i]));
    }
    const mark = p.watermark[p.watermark.length - 1];
    if (mark > 0) { c.fillStyle = theme.warn; for (let a = 0; a < width; a += 10) c.fillRect(a, y(mark) - 1, 6, 2); }
  }
  function line(p) {
    const { context: c, height } = speed, x = place(p), rates = p.output.map((n, i) => p.step_s[i] > 0 ? n / p.step_s[i] : 0), num = Math.max(1, Math.floor(rates.length / 120));
    const smooth = rates.map((_, i) => { let n = 0, s = 0; for (let k = Math.max(0, i - num); k <= i; k++) { n += p.output[k]; s += p.step_s[k]; } return s > 0 ? n / s : 0; });
    const most = smooth.reduce((a, b) => Math.max(a, b), 1e-9);
    c.clearRect(0, 0, width, height);
    c.fillStyle = theme.panel;
    c.fillRect(0, 0, width, height);
    c.strokeStyle = theme.used;
    c.lineWidth = 1.5;
    c.beginPath();
    smooth.forEach((v, i) => c[i ? "lineTo" : "moveTo"](x(p.end_s[i]), height - 2 - v / most * (height - 18)));
    c.stroke();
    c.fillStyle = theme.soft;
    c.font = '11px "DejaVu Sans", Verdana, sans-serif';
    c.fillText(`most: ${count(Math.round(most))}`, 6, 12);
  }
  model.on("change:status", draw);
  model.on("change:stop", draw);
  const end = onWidth(root, now => { width = now - 4; memory.fit(width); speed.fit(width); draw(); });
  return () => { end(); model.off?.("change:status", draw); model.off?.("change:stop", draw); cancelAnimationFrame(pending); clearTimeout(unheard); };
}

export default themed(render);
