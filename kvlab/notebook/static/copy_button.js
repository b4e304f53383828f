// A button that puts its `text` on the clipboard and says so for a moment. The text is in the page already: no way to the kernel.
function fallback(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.style.position = "fixed";
  area.style.opacity = "0";
  document.body.appendChild(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return fallback(text);
  }
}

export default {
  render({ model, el }) {
    const button = document.createElement("button");
    button.className = "lm-Widget jupyter-widgets jupyter-button widget-button kvlab-copy";
    button.style.width = "100%";
    button.style.margin = "0";
    let timer = null;
    const label = () => {
      button.textContent = model.get("label");
      button.title = model.get("text");
    };
    button.addEventListener("click", async () => {
      button.textContent = (await copy(model.get("text"))) ? "copied" : "select and copy below";
      model.set("num_copied", model.get("num_copied") + 1);
      model.save_changes();
      clearTimeout(timer);
      timer = setTimeout(label, 1500);
    });
    model.on("change:label", label);
    model.on("change:text", label);
    label();
    el.appendChild(button);
    return () => clearTimeout(timer);
  },
};
