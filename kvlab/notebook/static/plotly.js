// Plotly's module of 5 MB behind a small one. anywidget gives a module two seconds to load, and a widget whose module is later never hears
// of the kernel again. So the model is ready at once; what the kernel says while plotly loads is kept and told then. The page loads plotly
// once, not once a figure.
const loading = (globalThis.kvlabPlotly ??= new Map());

// The page answers nothing while it evaluates the module: other widgets of the cell first.
const idle = () =>
  new Promise((ready) => (globalThis.requestIdleCallback ? requestIdleCallback(ready, { timeout: 2000 }) : setTimeout(ready, 50)));

function load(source) {
  if (!loading.has(source)) {
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    loading.set(source, idle().then(() => import(url)).finally(() => URL.revokeObjectURL(url)));
  }
  return loading.get(source);
}

const MESSAGES = [
  "addTraces", "restyle", "relayout", "update", "animate", "deleteTraces", "moveTraces", "removeLayoutProps", "removeTraceProps",
].map((name) => `_py2js_${name}`);

async function figureOf(model) {
  const heard = [];
  const hears = MESSAGES.map((name) => [`change:${name}`, () => model.get(name) && heard.push([name, model.get(name)])]);
  for (const [event, hear] of hears) model.on(event, hear);
  const figure = (await load(model.get("_plotly"))).default();
  for (const [event, hear] of hears) model.off(event, hear);
  figure.initialize({ model });
  for (const [name, message] of heard) {
    model.set(name, message);
    model.set(name, null);
  }
  return figure;
}

export default () => {
  let figure = null;
  return {
    initialize({ model }) {
      figure = figureOf(model);
    },
    async render({ model, el }) {
      el.classList.add("kvlab-plot"); // plot.css
      return (await figure).render({ model, el });
    },
  };
};
