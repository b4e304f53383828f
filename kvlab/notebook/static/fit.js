// Tells plots beside it how wide they may be: plotly's widget draws before it is on the page, at its default width, and asks again only
// when the window changes. Some tries, then it lets be: a plot with a width of its own is not to be told for ever.
const MOST = 20;

export default {
  render({ el }) {
    el.style.display = "none";
    let width = 0;
    let tries = 0;
    const look = () => {
      const box = el.closest(".widget-vbox");
      if (!box || !box.clientWidth) return;
      if (box.clientWidth !== width) tries = 0;
      width = box.clientWidth;
      const misfit = [...box.querySelectorAll(".js-plotly-plot")].some((plot) => {
        const drawn = plot.querySelector(".main-svg");
        return drawn && Math.abs(drawn.getBoundingClientRect().width - plot.clientWidth) > 2;
      });
      if (misfit && tries++ < MOST) window.dispatchEvent(new Event("resize"));
    };
    const timer = setInterval(look, 250);
    return () => clearInterval(timer);
  },
};
