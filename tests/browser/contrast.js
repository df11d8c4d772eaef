// Every visible text of the page whose contrast with what lies behind it is under 4.5 (WCAG 2.2, 1.4.3 AA).
// Colours are composited through all ancestors, so that translucent layers count as they are seen.
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const backdrop = (element) => {
    if (element === null) return [255, 255, 255, 1];
    return over(rgba(getComputedStyle(element).backgroundColor), backdrop(element.parentElement));
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const bad = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest("style")) continue;
    const style = getComputedStyle(element);
    const behind = backdrop(element);
    const ink = over(rgba(element.closest("svg") ? style.fill : style.color), behind);
    seen += 1;
    const found = ratio(ink, behind);
    if (found < 4.5) bad.push(`${found.toFixed(2)} ${element.tagName} ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return { seen, bad };
})();
