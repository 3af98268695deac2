// Of every text that can be seen, and of every curve: its size, and the contrast of its colour with what is behind it.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [red, green, blue] = rgba(colour).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ratio = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((first, second) => first - second);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.checkVisibility() || node.closest("script, style, title")) continue;
    const style = getComputedStyle(node), colour = node instanceof SVGElement ? style.fill : style.color;
    const what = node.textContent.slice(0, 40);
    found.push({ kind: "text", what, size: parseFloat(style.fontSize), ratio: ratio(colour, ground(node)) });
  }
  for (const node of document.querySelectorAll(".curve:not(.raw), .dot, line.mark, line.alarm")) {
    const style = getComputedStyle(node), card = node.closest(".card");
    const colour = node.classList.contains("dot") ? style.backgroundColor : style.stroke;
    found.push({ kind: "line", what: card.dataset.card, size: 12, ratio: ratio(colour, ground(card)) });
  }
  return found;
})()
