// Everything a run ever cached as a tree: a row a path, a column a block of it; what is held, cached, evicted after the step.

async function render({ model, el }) {
  const { root, theme } = frame(el);
  const meta = model.get("meta");
  if (meta.message) { message(root, meta.message); return; }
  const data = await unpack(model.get("data"), meta.layout), num = meta.num_contents;
  const log = new Log(num, data.starts, data.block, data.kind, data.ref_count, data.request);
  const hits = new Uint32Array(log.cell.length); // of the record's content so far
  for (let r = 0; r < hits.length; r++) hits[r] = (log.prev[r] < 0 ? 0 : hits[log.prev[r]]) + (log.kind[r] === 2);
  const most = hits.reduce((a, b) => Math.max(a, b), 1);
  const cursor = new Cursor(model, meta.num_steps, draw);
  const bar = scrubber(cursor, step => `step ${count(step)} of ${count(meta.num_steps - 1)}`);
  const high = Math.max(3, Math.min(20, Math.floor(420 / meta.num_rows)));
  const body = canvas(meta.num_rows * high, { tabindex: 0, role: "img", "aria-label": meta.title, "data-lm-suppress-shortcuts": "true" });
  const detailNode = h("div", { class: "kvlab-detail" }), told = h("div", { class: "kvlab-status" });
  let by = "state", hover = null, pinned = null, wide = 0, width = 0, pending = 0;
  const buttons = ["state", "hits"].map(name => h("button", { type: "button", "aria-pressed": String(name === by), onclick: () => {
    by = name;
    buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(["state", "hits"][i] === by)));
    draw();
  } }, name));
  const keys = [["used", theme.used], ["shared", theme.shared], ["cached", theme.cached], ["evicted", theme.gone]].map(([name, color]) => {
    const number = h("b", { style: `min-width:${String(count(num)).length}ch` });
    return { number, node: h("span", { class: "kvlab-key" }, h("i", { style: `background:${color};border:1px solid var(--kv-line)` }), name, number) };
  });
  root.append(h("div", { class: "kvlab-head" }, h("div", { class: "kvlab-title", role: "heading", "aria-level": "3" }, meta.title),
    h("span", { class: "kvlab-sub" }, `${plural(num, "block")} ever cached, ${plural(meta.num_rows, "path")}`), h("span", { class: "kvlab-spacer" }),
    h("div", { class: "kvlab-choice", role: "group", "aria-label": "colour by" }, h("span", {}, "colour by"), ...buttons)),
  h("div", { class: "kvlab-legend" }, ...keys.map(k => k.node), h("span", { class: "kvlab-key" }, h("i", { style: "border:2px solid var(--kv-warn)" }), "hit in this step")),
  h("div", { class: "kvlab-body" }, h("div", { class: "kvlab-grids kvlab-scroll" }, body.node), detailNode), told, bar.node,
  ...meta.notes.map(note => h("p", { class: "kvlab-note" }, note)));

  function lay(now) {
    const beside = now >= 720;
    detailNode.style.flexBasis = beside ? "250px" : "100%";
    const room = (beside ? now - 270 : now - 4) - 18;
    wide = Math.max(3, Math.min(30, Math.floor(room / (meta.max_depth + 1))));
    width = Math.max(room, (meta.max_depth + 1) * wide);
    body.fit(width, meta.num_rows * high);
    draw();
  }
  function draw() { if (!pending) pending = requestAnimationFrame(() => { pending = 0; paint(); }); }
  function box(c) { return [data.depth[c] * wide, data.first_row[c] * high, wide - (wide > 4 ? 1 : 0), data.rows[c] * high - (high > 4 ? 1 : 0)]; }
  function color(c, r) {
    if (log.state[r] === FREE) return theme.gone;
    if (by === "state") return [theme.free, theme.used, theme.shared, theme.cached][log.state[r]];
    return mix(mix(theme.cached, theme.paper, 0.75), theme.used, Math.log1p(hits[r]) / Math.log1p(most));
  }
  function paint() {
    const { context: c } = body, counts = [0, 0, 0, 0];
    log.seek(cursor.step);
    c.clearRect(0, 0, width, meta.num_rows * high);
    for (let i = 0; i < num; i++) {
      const r = log.last[i];
      if (r < 0) continue;
      counts[[3, 0, 1, 2][log.state[r]]]++;
      if (!data.rows[i]) continue;
      const [x, y, w, t] = box(i);
      c.fillStyle = color(i, r);
      c.fillRect(x, y, w, t);
      if (log.state[r] === FREE && wide > 4) { c.strokeStyle = theme.line; c.lineWidth = 1; c.strokeRect(x + 0.5, y + 0.5, w - 1, t - 1); }
    }
    c.strokeStyle = theme.warn;
    c.lineWidth = 2;
    let numHits = 0, numEvicted = 0, numNew = 0;
    for (let r = log.starts[cursor.step]; r < log.starts[cursor.step + 1]; r++) {
      const k = log.kind[r], i = log.cell[r];
      numHits += k === 2; numEvicted += k === 7; numNew += k === 1;
      if (k === 2 && data.rows[i]) { const [x, y, w, t] = box(i); c.strokeRect(x + 1, y + 1, w - 2, t - 2); }
    }
    const shown = hover ?? pinned;
    if (shown !== null) { const [x, y, w, t] = box(shown); c.strokeStyle = theme.ink; c.strokeRect(x, y, w, t); }
    keys.forEach((k, i) => { k.number.textContent = count(counts[i]); });
    const did = [[numNew, "published"], [numHits, "hit"], [numEvicted, "evicted"]].filter(x => x[0]).map(([n, word]) => `${count(n)} ${word}`);
    told.textContent = `in this step: ${did.join(", ") || "nothing"}`;
    detail(shown);
    bar.update();
  }
  function detail(i) {
    if (i === null) {
      detailNode.replaceChildren(h("div", { class: "kvlab-name" }, "Cached block"), h("p", {}, "Point at a block; click to keep it in view. Each row is a path from a prompt's first block."));
      return;
    }
    const r = log.last[i], name = k => meta.requests[k] || "nobody";
    const state = r < 0 ? "not published yet" : log.state[r] === FREE ? "evicted" : ["", "used by one", "shared", "cached, held by none"][log.state[r]];
    const held = [...new Set(log.holders(i))].map(name), born = log.history(i, Infinity).filter(k => log.kind[k] === 1).pop();
    const rows = [["state", state], ["place", `block ${data.depth[i]} of its prompts`], ["hits so far", r < 0 ? "0" : count(hits[r])], ["references", r < 0 || log.state[r] === FREE ? "0" : String(log.refs[r])]];
    if (born !== undefined) rows.push(["published", `step ${log.stepOf(born)}, by ${name(log.request[born])}`], ["hash", h("code", {}, data.content[born].toString(16).padStart(8, "0") + "…")]);
    if (held.length) rows.push(["held by", held.slice(0, 5).join(", ") + (held.length > 5 ? ` and ${held.length - 5} more` : "")]);
    detailNode.replaceChildren(h("div", { class: "kvlab-name" }, `Cached block ${i}`), h("dl", {}, ...rows.flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])),
      h("ol", {}, ...log.history(i, 7).map(k => h("li", {}, `step ${log.stepOf(k)}: ${KINDS[log.kind[k]]}${log.request[k] ? ` (${name(log.request[k])})` : ""}`))));
  }
  function at(event) {
    const area = body.node.getBoundingClientRect(), depth = Math.floor((event.clientX - area.left) / wide), row = Math.floor((event.clientY - area.top) / high);
    for (let i = 0; i < num; i++) if (data.depth[i] === depth && data.rows[i] && data.first_row[i] <= row && row < data.first_row[i] + data.rows[i]) return log.last[i] < 0 ? null : i;
    return null;
  }
  body.node.addEventListener("pointermove", event => { hover = at(event); draw(); });
  body.node.addEventListener("pointerleave", () => { hover = null; draw(); });
  body.node.addEventListener("click", event => { const i = at(event); pinned = i === pinned ? null : i; draw(); });
  body.node.addEventListener("keydown", event => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (way === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    cursor.go(cursor.step + way);
  });
  const stop = onWidth(root, lay);
  root.kvlab = { cursor, log };
  return () => { stop(); bar.pause(); cursor.close(); cancelAnimationFrame(pending); };
}

export default themed(render);
