for (const svg of document.querySelectorAll("svg.chart")) {
  const [x0, x1, xf] = svg.dataset.x.split(" ").map(Number), [y0, y1, yf] = svg.dataset.y.split(" ").map(Number);
  const [left, right, bottom, top] = svg.dataset.box.split(" ").map(Number);
  const figure = svg.closest("figure"), readout = figure.querySelector(".readout");
  const cross = document.createElementNS(svg.namespaceURI, "path");
  cross.setAttribute("class", "cross");
  svg.append(cross);
  const lines = [...svg.querySelectorAll("polyline")].map(line => ({line, name: line.dataset.name,
    points: line.getAttribute("points").split(" ").map(p => p.split(",").map(Number))}));
  const short = v => Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(3) : String(+v.toPrecision(5));
  let at = null;
  const show = x => {
    at = Math.min(right, Math.max(left, x));
    cross.setAttribute("d", `M${at} ${top}V${bottom}`);
    const said = [`${svg.dataset.unit} ${short((x0 + (at - left) / (right - left) * (x1 - x0)) * xf)}`];
    for (const {line, name, points} of lines) {
      if (!points.length || !line.getClientRects().length) continue;
      const near = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      said.push(`${name}: ${short((y0 + (bottom - near[1]) / (bottom - top) * (y1 - y0)) * yf)}`);
    }
    readout.textContent = said.join("\n");
    readout.hidden = false;
    readout.style.right = at > (left + right) / 2 ? "auto" : "0";
  };
  const hide = () => { at = null; cross.removeAttribute("d"); readout.hidden = true; };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    show((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const by = {ArrowLeft: -4, ArrowRight: 4}[event.key];
    if (!by) return;
    event.preventDefault();
    show((at ?? (by > 0 ? left : right)) + by);
  });
}
