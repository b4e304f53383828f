// The physical block pool as a grid: a cell a block, coloured by state or owner; details on hover; a scrubber over the steps.

async function render({ model, el }) {
  const { root, theme } = frame(el);
  const meta = model.get("meta");
  if (meta.message) { message(root, meta.message); return; }
  const data = await unpack(model.get("data"), meta.layout);
  const tiers = meta.tiers.map(t => new Tier(t, data, meta));
  const view = { model, meta, data, tiers, theme, root, by: model.get("color_by"), hover: null, pinned: null };
  const cursor = new Cursor(model, meta.num_steps, draw);
  const bar = scrubber(cursor, step => `step ${count(step)} of ${count(meta.num_steps - 1)}`);
  const parts = build(view, cursor, bar);
  let pending = 0;

  function lay(width) {
    const beside = width >= 720;
    parts.detail.style.flexBasis = beside ? "250px" : "100%";
    const room = beside ? width - 270 : width - 4;
    for (const tier of tiers) tier.fit(room);
    parts.strip.fit(width - 4, 40);
    parts.usage = usage(view, width - 4);
    draw();
  }
  function draw() { // at most once a frame, however many events come
    if (!pending) pending = requestAnimationFrame(() => { pending = 0; paint(view, cursor.step, parts, bar); });
  }
  const color = () => { view.by = model.get("color_by"); draw(); };
  model.on("change:color_by", color);
  view.redraw = draw;
  const stop = onWidth(root, lay);
  root.kvlab = { view, cursor, paint: step => paint(view, step, parts, bar) }; // for measurements and tests
  return () => { stop(); bar.pause(); cursor.close(); model.off?.("change:color_by", color); cancelAnimationFrame(pending); };
}

class Tier {
  constructor(tier, data, meta) {
    const get = name => data[`${tier.name}_${name}`];
    Object.assign(this, { name: tier.name, title: tier.title, num: tier.num_blocks, content: get("content"), size: meta.block_size });
    this.log = new Log(this.num, get("starts"), get("block"), get("kind"), get("ref_count"), get("request"));
    const fills = get("fill");
    this.fills = fills.length ? new Log(this.num, get("fill_starts"), get("fill_block"), new Uint8Array(fills.length), fills, null) : null;
    this.sources = new Map(tier.sources.map(([step, block, source]) => [`${step}:${block}`, source]));
    this.states = new Uint8Array(this.num);
    this.surface = canvas(10, { tabindex: 0, role: "img", "aria-label": tier.title, "data-lm-suppress-shortcuts": "true" });
    this.counts = this._counts();
  }

  _counts() { // blocks in each state after each step, [steps * 4]
    const { log } = this, S = log.numSteps, out = new Uint32Array(S * 4), now = [this.num, 0, 0, 0];
    for (let s = 0, r = 0; s < S; s++) {
      for (; r < log.starts[s + 1]; r++) {
        now[log.prev[r] < 0 ? FREE : log.state[log.prev[r]]]--;
        now[log.state[r]]++;
      }
      out.set(now, s * 4);
    }
    return out;
  }

  fit(width) {
    const most = this.name === "gpu" ? 380 : 120;
    let cell = Math.min(36, Math.floor(Math.sqrt(width * most / this.num)));
    cell = Math.max(2, cell);
    let columns = Math.max(1, Math.floor(width / cell));
    if (columns >= 16) columns -= columns % (columns >= 64 ? 16 : 8); // rows begin at round numbers
    this.cell = cell;
    this.columns = Math.min(columns, this.num);
    this.rows = Math.ceil(this.num / this.columns);
    this.gap = cell >= 8 ? 2 : cell >= 4 ? 1 : 0;
    this.surface.fit(this.columns * cell, this.rows * cell);
    this.small = Object.assign(document.createElement("canvas"), { width: this.columns, height: this.rows });
    this.pixels = this.small.getContext("2d").createImageData(this.columns, this.rows);
    this.words = new Uint32Array(this.pixels.data.buffer);
  }

  blockAt(event) {
    const box = this.surface.node.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / this.cell), y = Math.floor((event.clientY - box.top) / this.cell);
    const block = y * this.columns + x;
    return x >= 0 && x < this.columns && y >= 0 && block >= 0 && block < this.num ? block : null;
  }

  seek(step, watermark) { // states, with the watermark drawn on the highest free blocks: it is a number, not a place
    this.log.seek(step);
    this.fills?.seek(step);
    const { states, log } = this;
    for (let b = 0; b < this.num; b++) { const r = log.last[b]; states[b] = r < 0 ? FREE : log.state[r]; }
    this.reserved = 0;
    if (this.name !== "gpu") { for (let b = 0; b < this.num; b++) if (states[b] !== FREE) states[b] = SWAPPED; return; }
    for (let b = this.num - 1; b >= 0 && this.reserved < watermark; b--) if (states[b] === FREE) { states[b] = RESERVED; this.reserved++; }
  }

  fill(b) { // filled slots, or -1 where that was not recorded
    if (this.states[b] === FREE || this.states[b] === RESERVED) return 0;
    if (this.fills === null) return this.content[this.log.last[b]] ? this.size : -1;
    const r = this.fills.last[b];
    return r < 0 ? -1 : this.fills.refs[r];
  }
}

function palette(theme) { return [theme.free, theme.used, theme.shared, theme.cached, theme.reserved, theme.swapped]; }

function ownerColor(owner) { return owner ? OWNERS[(owner - 1) % OWNERS.length] : "#999999"; }

function colorOf(view, tier, b) {
  const state = tier.states[b], { theme } = view;
  if (view.by === "state" || state === FREE || state === RESERVED) return palette(theme)[state];
  const own = ownerColor(tier.log.owner[tier.log.last[b]]);
  return state === CACHED ? mix(own, theme.paper, 0.65) : own;
}

function paintTier(view, tier) {
  const { context: c, width, height } = tier.surface, { cell, gap, columns, words, states, log } = tier, { theme } = view;
  const blank = rgba(theme.paper, 0), plain = palette(theme).map(x => rgba(x));
  if (view.by === "state") for (let b = 0; b < tier.num; b++) words[b] = plain[states[b]];
  else {
    const owned = OWNERS.map(x => rgba(x)), faint = OWNERS.map(x => rgba(mix(x, theme.paper, 0.65))), nobody = rgba("#999999");
    for (let b = 0; b < tier.num; b++) {
      const s = states[b];
      if (s === FREE || s === RESERVED) { words[b] = plain[s]; continue; }
      const owner = log.owner[log.last[b]];
      words[b] = owner === 0 ? nobody : (s === CACHED ? faint : owned)[(owner - 1) % OWNERS.length];
    }
  }
  words.fill(blank, tier.num);
  tier.small.getContext("2d").putImageData(tier.pixels, 0, 0);
  c.clearRect(0, 0, width, height);
  c.imageSmoothingEnabled = false;
  c.drawImage(tier.small, 0, 0, width, height);
  if (gap) { // cut the cells apart
    c.globalCompositeOperation = "destination-out";
    c.beginPath();
    for (let x = 1; x <= columns; x++) c.rect(x * cell - gap, 0, gap, height);
    for (let y = 1; y <= tier.rows; y++) c.rect(0, y * cell - gap, width, gap);
    c.fill();
    c.globalCompositeOperation = "source-over";
  }
  if (cell >= 12) paintFills(view, tier);
  for (const [where, color] of [[view.pinned, theme.ink], [view.hover, theme.warn]]) {
    if (where === null || where.tier !== tier) continue;
    const x = where.block % columns * cell, y = Math.floor(where.block / columns) * cell;
    c.strokeStyle = color;
    c.lineWidth = 2;
    c.strokeRect(x - 1, y - 1, cell - gap + 2, cell - gap + 2);
  }
}

function paintFills(view, tier) { // slots without a token are pale, and a dot marks each reference beyond the first
  const { context: c } = tier.surface, { cell, gap, columns, states, log } = tier, inner = cell - gap;
  for (let b = 0; b < tier.num; b++) {
    const x = b % columns * cell, y = Math.floor(b / columns) * cell, fill = tier.fill(b);
    if (fill >= 0 && fill < tier.size && states[b] !== FREE && states[b] !== RESERVED) {
      const top = Math.round(inner * (1 - fill / tier.size));
      c.fillStyle = mix(colorOf(view, tier, b), view.theme.paper, 0.72);
      c.fillRect(x, y, inner, top);
    }
    if (view.by === "owner" && states[b] === SHARED) {
      c.fillStyle = view.theme.paper;
      const dots = Math.min(3, log.refs[log.last[b]] - 1);
      for (let i = 0; i < dots; i++) c.fillRect(x + 3 + i * 5, y + 3, 3, 3);
    }
  }
}

function paint(view, step, parts, bar) {
  const watermark = view.data.watermark[step] ?? 0;
  for (const tier of view.tiers) { tier.seek(step, watermark); paintTier(view, tier); }
  legend(view, step, parts);
  const { context: c, width, height } = parts.strip;
  c.clearRect(0, 0, width, height);
  c.drawImage(parts.usage, 0, 0, width, height);
  const x = view.meta.num_steps > 1 ? step / (view.meta.num_steps - 1) * (width - 2) + 1 : 1;
  c.fillStyle = view.theme.ink;
  c.fillRect(Math.round(x) - 1, 0, 2, height);
  parts.status.textContent = status(view, step);
  detail(view, step, parts.detail);
  bar.update();
}

function legend(view, step, parts) {
  const gpu = view.tiers[0], counts = [...gpu.counts.subarray(step * 4, step * 4 + 4)];
  const values = [counts[FREE] - gpu.reserved, counts[USED], counts[SHARED], counts[CACHED], gpu.reserved];
  if (view.tiers[1]) values.push(view.tiers[1].num - view.tiers[1].counts[step * 4]);
  parts.numbers.forEach(node => { node.textContent = count(values[node.state]); });
  view.root.classList.toggle("kvlab-by-owner", view.by === "owner");
}

function status(view, step) {
  const { data, meta } = view, kinds = new Array(KINDS.length).fill(0), { log } = view.tiers[0];
  const words = [];
  if (data.end_s.length > step && !Number.isNaN(data.end_s[step])) words.push(`${data.end_s[step].toFixed(3)} s`);
  if (data.running.length > step) words.push(`${data.running[step]} running, ${data.waiting[step]} waiting` + (data.swapped[step] ? `, ${data.swapped[step]} swapped out` : ""));
  for (let r = log.starts[step]; r < log.starts[step + 1]; r++) kinds[log.kind[r]]++;
  const did = [[0, "allocated"], [2, "hit"], [3, "shared"], [10, "copied"], [7, "evicted"], [8, "swapped out"], [9, "swapped in"]]
    .filter(([k]) => kinds[k]).map(([k, word]) => `${count(kinds[k])} ${word}`);
  const freed = kinds[6] + kinds[5];
  if (freed) did.push(`${count(freed)} let go`);
  words.push(did.length ? `in this step: ${did.join(", ")}` : "in this step: no block changed hands");
  if (data.watermark[step]) words.push(`watermark ${count(data.watermark[step])}`);
  const blocked = meta.blocked[step];
  if (blocked) words.push(`first in line waits: ${blocked}`);
  return words.join("  ·  ");
}

const NAMES = ["free", "used by one", "shared", "cached, held by none", "free, kept by the watermark", "swapped out"];

function detail(view, step, node) {
  const where = view.hover ?? view.pinned;
  if (where === null) {
    node.replaceChildren(h("div", { class: "kvlab-name" }, "Block details"), h("p", {}, "Point at a block; click to keep it in view. With the keyboard: focus the grid, then the arrow keys."),
      h("p", {}, "Slider: ← → a step, Page Up / Down many, space plays."));
    return;
  }
  const { tier, block } = where, { log } = tier, last = log.last[block], state = tier.states[block], name = i => view.meta.requests[i] || "nobody";
  const rows = [["state", NAMES[state]]];
  if (last >= 0 && state !== FREE && state !== RESERVED) {
    const held = log.holders(block), fill = tier.fill(block);
    const names = [...new Set(held)].map(i => { const n = held.filter(x => x === i).length; return n > 1 ? `${name(i)} ×${n}` : name(i); });
    rows.push([state === CACHED ? "last owner" : "owner", (names.length ? names.slice(0, 6) : [name(log.owner[last])]).join(", ") + (names.length > 6 ? ` and ${names.length - 6} more` : "")]);
    rows.push(["tokens", fill < 0 ? "not recorded" : `${fill} of ${tier.size}`]);
    rows.push(["references", state === SWAPPED ? "1" : String(log.refs[last])]);
    rows.push(["hash", tier.content[last] ? h("code", {}, tier.content[last].toString(16).padStart(8, "0") + "…") : "not published"]);
    const born = log.history(block, Infinity).find(r => KINDS[log.kind[r]] === "allocate");
    if (born !== undefined) { const s = log.stepOf(born); rows.push(["age", `${plural(step - s, "step")}, since step ${s}`]); }
    rows.push(["last change", `${plural(step - log.stepOf(last), "step")} ago`]);
  }
  const list = log.history(block, 7).map(r => {
    const s = log.stepOf(r), kind = KINDS[log.kind[r]], source = ["copy", "swap_in"].includes(kind) || (kind === "allocate" && tier.name === "cpu") ? tier.sources.get(`${s}:${block}`) : undefined;
    const from = source === undefined ? "" : ` from ${kind === "copy" ? "" : tier.name === "cpu" ? "gpu " : "cpu "}block ${source}`;
    return h("li", {}, `step ${s}: ${kind.replace("_", " ")}${from}${log.request[r] ? ` (${name(log.request[r])})` : ""}`);
  });
  node.replaceChildren(h("div", { class: "kvlab-name" }, `Block ${block}${tier.name === "gpu" ? "" : " of " + tier.name}`),
    h("dl", {}, ...rows.flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])),
    list.length ? h("ol", {}, ...list) : h("p", {}, "Not used so far."));
}

function usage(view, width) { // used, shared, cached over all steps, drawn once
  const ratio = globalThis.devicePixelRatio || 1, W = Math.max(1, Math.round(width * ratio)), H = Math.round(40 * ratio);
  const picture = Object.assign(document.createElement("canvas"), { width: W, height: H }), c = picture.getContext("2d");
  const { counts, num } = view.tiers[0], S = view.meta.num_steps, { theme } = view;
  c.fillStyle = theme.free;
  c.fillRect(0, 0, W, H);
  for (let x = 0; x < W; x++) {
    const a = Math.floor(x / W * S), b = Math.max(a + 1, Math.floor((x + 1) / W * S));
    let best = a; // the fullest step of the stretch
    for (let s = a; s < b; s++) if (counts[s * 4] < counts[best * 4]) best = s;
    let y = H;
    for (const [state, color] of [[USED, theme.used], [SHARED, theme.shared], [CACHED, theme.cached]]) {
      const tall = counts[best * 4 + state] / num * H;
      c.fillStyle = color;
      c.fillRect(x, y - tall, 1, tall);
      y -= tall;
    }
  }
  return picture;
}

function build(view, cursor, bar) {
  const { meta, theme, root, tiers, model } = view, colors = palette(theme), numbers = [];
  const choice = h("div", { class: "kvlab-choice", role: "group", "aria-label": "colour by" }, h("span", {}, "colour by"));
  for (const by of ["state", "owner"]) {
    const button = h("button", { type: "button", "aria-pressed": String(view.by === by), onclick: () => { model.set("color_by", by); model.save_changes(); } }, by);
    model.on("change:color_by", () => button.setAttribute("aria-pressed", String(model.get("color_by") === by)));
    choice.append(button);
  }
  const keys = [[USED, "used"], [SHARED, "shared"], [CACHED, "cached"], [FREE, "free"], [RESERVED, "free, kept by the watermark"], ...(tiers[1] ? [[SWAPPED, "swapped out"]] : [])];
  const legendNode = h("div", { class: "kvlab-legend" }, ...keys.map(([state, text]) => {
    const number = h("b", { style: `min-width:${String(count(tiers[0].num)).length}ch` });
    number.state = state;
    numbers.push(number);
    const held = [USED, SHARED, CACHED].includes(state) ? "kvlab-held" : "";
    return h("span", { class: "kvlab-key" }, h("i", { style: `background:${colors[state]}`, class: held }), text, number);
  }), h("span", { class: "kvlab-owner-note" }, "colour: a request; pale: cached; dots: held by others too"));
  const strip = canvas(40, { "aria-hidden": "true", title: "blocks used, shared and cached over the run" });
  const move = event => { const box = strip.node.getBoundingClientRect(); bar.pause(); cursor.go((event.clientX - box.left) / box.width * (meta.num_steps - 1)); };
  strip.node.addEventListener("pointerdown", event => { strip.node.setPointerCapture(event.pointerId); move(event); });
  strip.node.addEventListener("pointermove", event => { if (event.buttons) move(event); });
  const detailNode = h("div", { class: "kvlab-detail", "aria-live": "off" }), statusNode = h("div", { class: "kvlab-status" });
  const grids = h("div", { class: "kvlab-grids" });
  for (const tier of tiers) {
    if (tier.name !== "gpu") grids.append(h("div", { class: "kvlab-tier" }, tier.title));
    grids.append(tier.surface.node);
    listen(view, tier);
  }
  root.append(h("div", { class: "kvlab-head" }, h("div", { class: "kvlab-title", role: "heading", "aria-level": "3" }, meta.title), h("span", { class: "kvlab-sub" }, tiers[0].title), h("span", { class: "kvlab-spacer" }), choice),
    legendNode, h("div", { class: "kvlab-body" }, grids, detailNode), statusNode, strip.node, bar.node,
    ...meta.notes.map(note => h("p", { class: "kvlab-note" }, note)));
  return { numbers, strip, detail: detailNode, status: statusNode };
}

function listen(view, tier) {
  const { node } = tier.surface;
  const point = event => { const block = tier.blockAt(event); view.hover = block === null ? null : { tier, block }; view.redraw(); };
  node.addEventListener("pointermove", point);
  node.addEventListener("pointerleave", () => { view.hover = null; view.redraw(); });
  node.addEventListener("click", event => {
    const block = tier.blockAt(event), same = view.pinned?.tier === tier && view.pinned.block === block;
    view.pinned = block === null || same ? null : { tier, block };
    view.redraw();
  });
  node.addEventListener("keydown", event => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: tier.columns, ArrowUp: -tier.columns }[event.key];
    if (event.key === "Escape") view.pinned = null;
    else if (by === undefined) return;
    else {
      const block = view.pinned?.tier === tier ? view.pinned.block + by : 0;
      if (block >= 0 && block < tier.num) view.pinned = { tier, block };
    }
    event.preventDefault();
    event.stopPropagation();
    view.redraw();
  });
}

export default themed(render);
