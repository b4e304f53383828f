// Tells plots beside it how wide they may be: plotly's widget draws before it is on the page, at its default width, and asks again only
// when the window changes.
export default {
  render({ el }) {
    el.style.display = "none";
    const tell = () => window.dispatchEvent(new Event("resize"));
    let width = 0;
    let drawn = false;
    const look = () => {
      const box = el.closest(".widget-vbox");
      if (!box) return;
      const plot = box.querySelector(".js-plotly-plot .main-svg");
      if (box.clientWidth !== width || (plot !== null) !== drawn) tell();
      width = box.clientWidth;
      drawn = plot !== null;
    };
    const timer = setInterval(look, 250);
    look();
    return () => clearInterval(timer);
  },
};
