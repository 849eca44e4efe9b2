/* Excerpts of search results come from a page's article, not from the menus around it. */
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const toText = Search.htmlToText;
  Search.htmlToText = (page, anchor) =>
    toText(page.replace(' role="main"', "").replace("<article", '<article role="main"'), anchor);
});
