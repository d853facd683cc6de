// Open each page of the site at each width, and leave what was measured in the document's body.
// PAGES and SITE are set before this script runs.

const WIDTHS_PX = [1280, 390];
const HEIGHT_PX = 844;

/** The words that continue on another line without a hyphen or a break that the page allows. */
function brokenWords(page) {
  const texts = page.createTreeWalker(page.querySelector("article"), NodeFilter.SHOW_TEXT);
  const broken = [];
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (text.parentElement.closest("pre, script, style, svg, .headerlink")) continue;
    for (const word of text.data.matchAll(/[\p{L}\p{N}]+/gu)) {
      const range = page.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const boxes = [...range.getClientRects()].filter((box) => box.width > 0.5);
      if (new Set(boxes.map((box) => Math.round(box.top))).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}

async function open(path, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: ${HEIGHT_PX}px; border: 0`;
  frame.src = SITE + path;
  const loaded = new Promise((done) => (frame.onload = done));
  document.body.append(frame);
  await loaded;
  return frame;
}

async function measured() {
  const pages = [];
  for (const path of PAGES)
    for (const width of WIDTHS_PX) {
      const frame = await open(path, width);
      const page = frame.contentDocument;
      const height = page.querySelector("article").scrollHeight;
      pages.push({ path, width, height, content: page.documentElement.scrollWidth, broken: brokenWords(page) });
      frame.remove();
    }
  return pages;
}

measured().then((pages) => {
  document.body.textContent = "RESULT" + JSON.stringify(pages) + "END";
});
