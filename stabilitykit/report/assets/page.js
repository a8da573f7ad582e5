"use strict";
// Draws each figure when it comes near the window; colours follow the reader's light or dark setting.
const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const MARGIN = 400;  // pixels below the window in which a figure is drawn already
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const config = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

function theme() {
  const css = getComputedStyle(document.documentElement);
  const colour = (name) => css.getPropertyValue("--" + name).trim();
  const axis = {
    gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line"),
    tickcolor: colour("line"), title: { font: { color: colour("soft"), size: 12 }, standoff: 8 },
    spikecolor: colour("soft"), spikethickness: -1,
  };
  return { layout: {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
    xaxis: axis, yaxis: axis,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") },
  } };
}

function draw(plot) {
  const { data, layout } = figures[plots.indexOf(plot)];
  const narrow = plot.clientWidth < 640 ? { legend: { orientation: "h", y: -0.25 } } : {};
  plot.dataset.drawn = "yes";
  return Plotly.react(plot, data, { ...layout, ...narrow, template: theme() }, config);
}

function addChoices(plot) {
  const { data, layout } = figures[plots.indexOf(plot)];
  if (!layout.meta || !layout.meta.choices) return;
  const select = document.createElement("select");
  select.setAttribute("aria-label", "Quantity shown");
  layout.meta.choices.forEach((choice) => select.add(new Option(choice)));
  select.addEventListener("change", () => {
    data.forEach((trace, place) => { trace.visible = place === select.selectedIndex; });
    draw(plot);
  });
  plot.closest("article").querySelector("header").append(select);
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }
}, { rootMargin: `${MARGIN}px` });
// What is on the first screen does not wait for a frame.
const isNear = (plot) => plot.getBoundingClientRect().top < window.innerHeight + MARGIN;
plots.forEach((plot) => {
  addChoices(plot);
  if (isNear(plot)) draw(plot);
  else watcher.observe(plot);
});
dark.addEventListener("change", () => plots.filter((plot) => plot.dataset.drawn).forEach(draw));
window.addEventListener("beforeprint", () => plots.forEach(draw));
