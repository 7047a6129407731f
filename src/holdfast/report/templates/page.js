"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displaylogo: false, showLink: false, showEditInChartStudio: false,
    showSendToCloud: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "toImage"] };

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    return { ink: read("--ink"), line: read("--line"), card: read("--card"), soft: read("--soft") };
  }

  function themed(layout, colours) {
    const drawn = Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { color: colours.ink, size: 12, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: colours.card, bordercolor: colours.line, font: { color: colours.ink }, align: "left",
        namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colours.soft, activecolor: colours.ink },
    });
    for (const name of Object.keys(drawn)) {
      if (/^[xy]axis\d*$/.test(name)) {
        drawn[name] = Object.assign({}, drawn[name], { gridcolor: colours.line, linecolor: colours.line,
          tickcolor: colours.line, spikecolor: colours.soft, spikethickness: 1, spikedash: "dot",
          nticks: drawn[name].type === "date" && window.innerWidth < 600 ? 3 : 0 });
      }
    }
    return drawn;
  }

  function drawAll() {
    const colours = theme();
    return Promise.all(Object.keys(figures).map(function (name) {
      const place = document.getElementById(name);
      place.style.height = figures[name].layout.height + "px";  // a resize takes the height of the place
      return Plotly.newPlot(place, figures[name].data, themed(figures[name].layout, colours), config);
    }));
  }

  function recolour() {
    const colours = theme();
    for (const name of Object.keys(figures)) {
      const place = document.getElementById(name);
      const change = { "font.color": colours.ink, "hoverlabel.bgcolor": colours.card,
        "hoverlabel.bordercolor": colours.line, "hoverlabel.font.color": colours.ink,
        "modebar.color": colours.soft, "modebar.activecolor": colours.ink };
      for (const axis of Object.keys(place.layout)) {
        if (/^[xy]axis\d*$/.test(axis)) {
          change[axis + ".gridcolor"] = change[axis + ".linecolor"] = change[axis + ".tickcolor"] = colours.line;
          change[axis + ".spikecolor"] = colours.soft;
        }
      }
      Plotly.relayout(place, change);
    }
  }

  drawAll().then(function () { document.documentElement.dataset.drawn = String(Object.keys(figures).length); });
  dark.addEventListener("change", recolour);
})();
