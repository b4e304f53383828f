// Shows widgets on a page without a kernel: each is an ES module whose `render` gets a model with get, set, on, off and save_changes.
// The page carries the modules' texts, each model's state and its buffers (base64); nothing is loaded from anywhere.

const read = id => JSON.parse(document.getElementById(id).textContent);
const { modules, styles, models } = read("kvlab-models");

function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return new DataView(out.buffer);
}

class Model {
  constructor({ state, buffers }) {
    this.state = { ...state, ...Object.fromEntries(Object.entries(buffers).map(([name, text]) => [name, bytes(text)])) };
    this.hearers = new Map();
  }
  get(name) { return this.state[name]; }
  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.tell(`change:${name}`, value);
    this.tell("change", value);
  }
  tell(event, value) { for (const hear of [...(this.hearers.get(event) ?? [])]) hear(this, value); }
  on(event, hear) { if (!this.hearers.has(event)) this.hearers.set(event, new Set()); this.hearers.get(event).add(hear); }
  off(event, hear) { if (hear === undefined) this.hearers.delete(event); else this.hearers.get(event)?.delete(hear); }
  save_changes() {}
  send() {}
}

for (const text of styles) document.head.append(Object.assign(document.createElement("style"), { textContent: text }));
const loaded = modules.map(text => import(URL.createObjectURL(new Blob([text], { type: "text/javascript" }))));
const made = new Map(); // two views of one model share it

for (const slot of document.querySelectorAll("[data-kvlab-model]")) {
  const { module, ...rest } = models[slot.dataset.kvlabModel];
  try {
    let widget = (await loaded[module]).default;
    if (typeof widget === "function") widget = await widget();
    if (!made.has(slot.dataset.kvlabModel)) {
      const model = new Model(rest);
      made.set(slot.dataset.kvlabModel, model);
      await widget.initialize?.({ model });
    }
    await widget.render?.({ model: made.get(slot.dataset.kvlabModel), el: slot });
  } catch (error) {
    slot.textContent = `This widget could not be shown: ${error}`;
    console.error(error);
  }
}
document.body.dataset.kvlabReady = "true";
