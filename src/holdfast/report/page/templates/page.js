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
          nticks: drawn[name].type === "date" && window.innerWidth < 600 ? 2 : 0 });
      }
    }
    if (drawn.annotations && window.innerWidth < 600) {  // the names of the curves below the title
      drawn.annotations = drawn.annotations.map((each) =>
        Object.assign({}, each, { text: each.text.replace("&nbsp;&nbsp; ", "<br>") }));
    }
    if (drawn.xaxis.type === "date" && window.innerWidth < 600) {  // names in small letters, the legend in rows
      drawn.margin = Object.assign({}, drawn.margin, { l: Math.min(drawn.margin.l, 130), b: drawn.margin.b + 120 });
      drawn.yaxis.tickfont = { size: 9 };
      drawn.height += 120;
    }
    return drawn;
  }

  function drawAll() {
    const colours = theme();
    return Promise.all(Object.keys(figures).map(function (name) {
      const place = document.getElementById(name);
      const layout = themed(figures[name].layout, colours);
      place.style.height = layout.height + "px";  // a resize takes the height of the place
      return Plotly.newPlot(place, figures[name].data, layout, config);
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

  function smoothed(values, weight) {  // an exponential mean that begins without a bias; gaps stay gaps
    let mean = 0, sum = 0;
    return values.map(function (value) {
      if (value === null) { return null; }
      mean = weight * mean + (1 - weight) * value;
      sum = weight * sum + (1 - weight);
      return mean / sum;
    });
  }

  function buttons() {
    const [place, scale, smoothing] = ["steps", "scale", "smoothing"].map((id) => document.getElementById(id));
    const weights = [0, 0.6, 0.9, 0.99];
    if (!place) { return; }
    const data = figures.steps.data, curves = [...data.keys()].filter((at) => data[at].mode.startsWith("lines"));
    const read = curves.map((at) => data[at].y);  // plotly replaces those
    let chosen = 0;
    scale.hidden = figures.steps.layout.annotations[0].text.startsWith("<b>loss</b>") === false;
    scale.addEventListener("click", function () {
      const log = place.layout.yaxis.type !== "log";
      Plotly.relayout(place, { "yaxis.type": log ? "log" : "linear", "yaxis.dtick": null, "yaxis.autorange": true });
      scale.textContent = "loss: " + (log ? "log" : "linear");
    });
    smoothing.addEventListener("click", function () {
      chosen = (chosen + 1) % weights.length;
      Plotly.restyle(place, { y: read.map((values) => smoothed(values, weights[chosen])) }, curves);
      smoothing.textContent = "smoothing: " + (chosen ? weights[chosen] : "off");
    });
  }

  function load(addresses) {  // the first script that is there
    return new Promise(function (resolve, reject) {
      if (!addresses.length) { reject(new Error("plotly.js is missing")); return; }
      const element = document.createElement("script");
      element.src = addresses[0];
      element.onload = resolve;
      element.onerror = function () { load(addresses.slice(1)).then(resolve, reject); };
      document.head.appendChild(element);
    });
  }

  function draw() {
    buttons();
    dark.addEventListener("change", recolour);
    window.matchMedia("(max-width: 599px)").addEventListener("change", drawAll);
    return drawAll().then(function () { return Object.keys(figures).length; });
  }

  function tellMissing() {
    document.getElementById("missing").hidden = false;
    document.documentElement.classList.add("undrawn");
    return 0;
  }

  const isLoaded = PLOTLY_ADDRESSES.length ? load(PLOTLY_ADDRESSES) : Promise.resolve();
  isLoaded.then(draw, tellMissing).then(function (drawn) { document.documentElement.dataset.drawn = String(drawn); });
})();
