// Keeps the plots of the box it is in as wide as the box, and names its controls. Plotly draws a widget before it is on the page, at its default width, and
// measures again only when the window's size changes (its option `responsive`): this says so whenever the box's size has changed.
// ipywidgets ties its labels to no slider, and ours stand beside the menus: who can't see them hears the label's words as the name.
function nameControls(box) {
  for (const label of box.querySelectorAll(".widget-label")) {
    for (const control of label.nextElementSibling?.querySelectorAll("select, input, .noUi-handle") ?? []) {
      if (label.textContent && !control.labels?.[0]?.textContent) control.setAttribute("aria-label", label.textContent);
    }
  }
}

export default {
  render({ el }) {
    Object.assign(el.style, { height: "0", margin: "0" });
    let box = null;
    const fit = () => {
      nameControls(box);
      const misfit = [...box.querySelectorAll(".js-plotly-plot")].some((plot) => {
        const drawn = plot.querySelector(".main-svg");
        return drawn && plot.clientWidth && Math.abs(drawn.getBoundingClientRect().width - plot.clientWidth) > 2;
      });
      if (misfit) window.dispatchEvent(new Event("resize"));
    };
    const observer = new ResizeObserver(() => {
      if (!box) {
        box = el.closest(".widget-vbox");
        if (box) observer.observe(box); // a plot that appears later makes it taller
      }
      if (box) requestAnimationFrame(fit);
    });
    observer.observe(el);
    return () => observer.disconnect();
  },
};
