// Shared by kvlab's widgets: colours, typed arrays from a compressed buffer, the step all widgets of a run agree on, and a scrubber.
// Each widget's module is this text followed by its own; nothing is loaded from anywhere.

const LIGHT_THEME = {
  ink: "#222222", soft: "#666666", line: "#D5D5D5", paper: "#FFFFFF", panel: "#F6F6F6", accent: "#0072B2",
  free: "#E3E3E3", used: "#0072B2", shared: "#E69F00", cached: "#56B4E9", reserved: "#A9A9A9", swapped: "#CC79A7",
  prefill: "#E69F00", decode: "#0072B2", preempted: "#D55E00", queue: "#D9D9D9", warn: "#D55E00", gone: "#F0F0F0",
};
const DARK_THEME = {
  ink: "#E8E8E8", soft: "#A8A8A8", line: "#4A4A4A", paper: "#111111", panel: "#1C1C1C", accent: "#56B4E9",
  free: "#333333", used: "#2E8BC9", shared: "#E69F00", cached: "#8CCBF0", reserved: "#6E6E6E", swapped: "#CC79A7",
  prefill: "#E69F00", decode: "#2E8BC9", preempted: "#D55E00", queue: "#4A4A4A", warn: "#FF8A3D", gone: "#262626",
};
// Fifteen colours for owners, told apart by hue and lightness; requests take them in turn.
const OWNERS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7A5195", "#B5A000", "#3B4CC0", "#8C564B",
  "#1B9E9E", "#F0A0A0", "#5E8C31", "#A0A0E0", "#9C2A5C"];

function isDark() {
  const light = document.body.dataset.jpThemeLight;
  if (light !== undefined) return light === "false";
  if (document.body.dataset.kvlabPage === undefined) return false;
  return globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ?? false;
}

// A widget that is drawn anew when the page turns dark or light. What `render` returns ends it, now or at the end.
function themed(render) {
  return {
    async render({ model, el }) {
      let dark = null, end = null, turn = Promise.resolve();
      const draw = async () => {
        if (isDark() === dark) return;
        dark = isDark();
        end?.();
        el.replaceChildren();
        end = await render({ model, el });
      };
      const look = () => (turn = turn.then(draw)); // one after the other: a data set may still be unpacked
      const media = globalThis.matchMedia?.("(prefers-color-scheme: dark)"), observer = new MutationObserver(look);
      observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
      media?.addEventListener("change", look);
      await look();
      return () => {
        observer.disconnect();
        media?.removeEventListener("change", look);
        turn.then(() => end?.());
      };
    },
  };
}

function rgba(hex, alpha = 255) { // little-endian pixel of an ImageData
  const n = parseInt(hex.slice(1), 16);
  return ((alpha << 24) | ((n & 255) << 16) | (n & 0xFF00) | (n >> 16)) >>> 0;
}

function mix(a, b, share) { // share of b
  const [x, y] = [parseInt(a.slice(1), 16), parseInt(b.slice(1), 16)];
  const part = shift => Math.round(((x >> shift) & 255) * (1 - share) + ((y >> shift) & 255) * share);
  return "#" + [16, 8, 0].map(s => part(s).toString(16).padStart(2, "0")).join("");
}

function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter(c => c !== null));
  return node;
}

const count = n => n.toLocaleString("en-US");
const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

// ------------------------------------------------------------------------------------------------ data

async function unpack(data, layout) {
  const bytes = new Uint8Array(data.buffer ?? data, data.byteOffset ?? 0, data.byteLength);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  const types = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array, float64: Float64Array };
  return Object.fromEntries(Object.entries(layout).map(([name, [type, at, num]]) => [name, new types[type](raw, at, num)]));
}

const KINDS = ["allocate", "publish", "hit", "share", "unshare", "release", "free", "evict", "swap_out", "swap_in", "copy", "drop"];
const [FREE, USED, SHARED, CACHED, RESERVED, SWAPPED] = [0, 1, 2, 3, 4, 5];
const TAKES = new Set([0, 2, 3]), LETS_GO = new Set([4, 5, 6, 7]);
const KEYFRAME = 1 << 16; // records between two snapshots: a jump replays at most so many

// The last record of each of `num` cells (blocks, or contents of a tree) after a step. Stepping back follows each record's predecessor.
class Log {
  constructor(num, starts, cell, kind, refs, request) {
    Object.assign(this, { num, starts, cell, kind, refs, request });
    this.numSteps = starts.length - 1;
    const R = cell.length;
    this.prev = new Int32Array(R);
    this.state = new Uint8Array(R);
    this.owner = new Uint32Array(request === null ? 0 : R); // no requests: changes of a number, in `refs`
    this.last = new Int32Array(num).fill(-1);
    this.frames = [];
    const holders = new Map();
    for (let r = 0; r < R; r++) {
      if (r % KEYFRAME === 0) this.frames.push(this.last.slice());
      const c = cell[r], k = kind[r];
      this.prev[r] = this.last[c];
      this.last[c] = r;
      this.state[r] = k === 6 || k === 7 ? FREE : refs[r] > 1 ? SHARED : refs[r] === 1 ? USED : CACHED;
      if (request !== null) this.owner[r] = this._ownerAfter(holders, r, c, k);
    }
    this.last.fill(-1);
    this.at = 0; // records applied
    this.step = -1;
  }

  _ownerAfter(holders, r, c, k) {
    let held = holders.get(c);
    if (held === undefined) holders.set(c, held = []);
    const who = this.request[r];
    if (TAKES.has(k)) held.push(who);
    else if (LETS_GO.has(k) && held.length) {
      const i = held.indexOf(who);
      held.splice(i < 0 ? held.length - 1 : i, 1);
    }
    if (held.length) return held[held.length - 1];
    return LETS_GO.has(k) && k !== 6 && k !== 7 ? who : this.prev[r] >= 0 && k !== 6 && k !== 7 ? this.owner[this.prev[r]] : who;
  }

  seek(step) {
    const end = this.starts[Math.max(0, Math.min(step, this.numSteps - 1)) + 1];
    this.step = step;
    if (Math.abs(end - this.at) > KEYFRAME && this.frames.length) {
      const f = Math.min(Math.floor(end / KEYFRAME), this.frames.length - 1);
      this.last.set(this.frames[f]);
      this.at = f * KEYFRAME;
    }
    const { last, cell, prev } = this;
    for (; this.at < end; this.at++) last[cell[this.at]] = this.at;
    while (this.at > end) { this.at--; last[cell[this.at]] = prev[this.at]; }
  }

  stateOf(c) { const r = this.last[c]; return r < 0 ? FREE : this.state[r]; }

  holders(c) { // requests that hold the cell now, in the order in which they took it
    const records = this.history(c, Infinity).reverse(), held = [];
    for (const r of records) {
      if (TAKES.has(this.kind[r])) held.push(this.request[r]);
      else if (LETS_GO.has(this.kind[r]) && held.length) {
        const i = held.indexOf(this.request[r]);
        held.splice(i < 0 ? held.length - 1 : i, 1);
      }
    }
    return held;
  }

  history(c, most) { // records of the cell so far, latest first
    const found = [];
    for (let r = this.last[c]; r >= 0 && found.length < most; r = this.prev[r]) found.push(r);
    return found;
  }

  stepOf(r) { // by bisection
    let low = 0, high = this.numSteps - 1;
    while (low < high) { const m = (low + high) >> 1; if (this.starts[m + 1] > r) high = m; else low = m + 1; }
    return low;
  }
}

// ------------------------------------------------------------------------------------------------ one step for all widgets of a run

// Widgets of one run on one page move together, with or without a kernel. Only what a user does is told; what a kernel sets is not.
class Cursor {
  constructor(model, numSteps, onStep) {
    this.model = model;
    this.numSteps = numSteps;
    this.onStep = onStep;
    this.touched = 0;
    this.followers = []; // told of a step at once; what is drawn of it comes with the next frame
    const buses = globalThis.__kvlabBuses ??= new Map();
    const channel = model.get("channel") || Symbol("alone");
    if (!buses.has(channel)) buses.set(channel, new EventTarget());
    this.bus = buses.get(channel);
    this.heard = event => { if (event.detail.from !== this) this._take(event.detail.step); };
    this.bus.addEventListener("step", this.heard);
    this.set = () => { if (performance.now() - this.touched > 600) this._show(this.clip(model.get("step"))); };
    model.on("change:step", this.set);
    this.step = this.clip(model.get("step"));
  }

  clip(step) { return Math.max(0, Math.min(Math.round(step), this.numSteps - 1)); }

  _show(step) {
    if (step === this.step) return;
    this.step = step;
    for (const follow of this.followers) follow(step);
    this.onStep(step);
  }

  _take(step) {
    this.touched = performance.now();
    this._show(this.clip(step));
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.model.set("step", this.step); this.model.save_changes(); }, 150);
  }

  go(step) {
    step = this.clip(step);
    this._take(step);
    this.bus.dispatchEvent(new CustomEvent("step", { detail: { step, from: this } }));
  }

  close() {
    this.bus.removeEventListener("step", this.heard);
    this.model.off?.("change:step", this.set);
    clearTimeout(this.timer);
  }
}

const SPEEDS = [1, 5, 15, 30, 60, 120, 300];

// Play, pause, step, speed and a range input; `cursor.go` is what it calls.
function scrubber(cursor, label) {
  let playing = 0, from = 0, began = 0, speed = 15;
  const play = h("button", { class: "kvlab-play", type: "button", title: "play or pause (space)", "aria-label": "play", onclick: toggle });
  const range = h("input", {
    type: "range", min: 0, max: Math.max(0, cursor.numSteps - 1), step: 1, value: cursor.step, "aria-label": "step", class: "kvlab-range",
    "data-lm-suppress-shortcuts": "true", oninput: () => { cursor.go(+range.value); pause(); },
    onkeydown: event => { if (event.key === " ") { event.preventDefault(); event.stopPropagation(); toggle(); } },
  });
  const choice = h("select", { class: "kvlab-speed", "aria-label": "steps a second", "data-lm-suppress-shortcuts": "true",
    onchange: () => { speed = +choice.value; restart(); } }, ...SPEEDS.map(s => h("option", { value: s, selected: s === speed }, `${s} steps/s`)));
  const back = h("button", { type: "button", class: "kvlab-small", title: "a step back", "aria-label": "a step back",
    onclick: () => { pause(); cursor.go(cursor.step - 1); } }, "‹");
  const on = h("button", { type: "button", class: "kvlab-small", title: "a step on", "aria-label": "a step on",
    onclick: () => { pause(); cursor.go(cursor.step + 1); } }, "›");
  const text = h("output", { class: "kvlab-step" });
  const node = h("div", { class: "kvlab-scrubber" }, range, play, back, on, choice, text);

  function restart() { from = cursor.step; began = performance.now(); }
  function tick(now) {
    if (!playing || !node.isConnected) { pause(); return; }
    const step = from + Math.floor((now - began) / 1000 * speed);
    if (step > cursor.step) cursor.go(step);
    if (cursor.step >= cursor.numSteps - 1) { pause(); return; }
    playing = requestAnimationFrame(tick);
  }
  function toggle() {
    if (playing) { pause(); return; }
    if (cursor.step >= cursor.numSteps - 1) cursor.go(0);
    restart();
    playing = requestAnimationFrame(tick);
    update();
  }
  function pause() { cancelAnimationFrame(playing); playing = 0; update(); }
  function update() {
    play.textContent = playing ? "❚❚" : "▶";
    play.setAttribute("aria-pressed", playing ? "true" : "false");
    range.value = cursor.step;
    text.textContent = label(cursor.step);
  }
  cursor.followers.push(step => { range.value = step; }); // a second key within a frame starts from where the first one led
  update();
  return { node, update, pause, range };
}

// A canvas as wide as its parent, sharp on any screen; `draw(context, width, height)` in CSS pixels.
function canvas(height, attributes = {}) {
  const node = h("canvas", { class: "kvlab-canvas", ...attributes });
  const surface = { node, width: 0, height, context: node.getContext("2d"), fit };
  function fit(width, tall = surface.height) {
    const ratio = globalThis.devicePixelRatio || 1;
    Object.assign(surface, { width, height: tall });
    node.width = Math.max(1, Math.round(width * ratio));
    node.height = Math.max(1, Math.round(tall * ratio));
    node.style.width = `${width}px`;
    node.style.height = `${tall}px`;
    surface.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  return surface;
}

function message(el, text) { el.append(h("p", { class: "kvlab-message", role: "status" }, text)); }

function frame(el) {
  const root = h("div", { class: "kvlab-widget" });
  const theme = isDark() ? DARK_THEME : LIGHT_THEME;
  for (const [name, value] of Object.entries(theme)) root.style.setProperty(`--kv-${name}`, value);
  el.append(root);
  return { root, theme };
}

// Lays out anew when the width of `root` changes; the returned function ends that.
function onWidth(root, lay) {
  let width = 0;
  const look = () => {
    const now = Math.floor(root.clientWidth);
    if (now > 0 && now !== width) { width = now; lay(width); }
  };
  const observer = new ResizeObserver(look);
  observer.observe(root);
  look();
  return () => observer.disconnect();
}
