/* Excerpts of search results come from a page's article, not from the menus around it. */
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const toText = Search.htmlToText;
  Search.htmlToText = (page, anchor) =>
    toText(page.replace(' role="main"', "").replace("<article", '<article role="main"'), anchor);
});
/* The chapters of the menu are folded, but for the page's own. */
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".bd-docs-nav p.caption").forEach((caption) => {
    const [chapter, title] = ["details", "summary"].map((tag) => document.createElement(tag));
    const pages = caption.nextElementSibling;
    chapter.open = pages.querySelector(".current") !== null;
    caption.before(chapter);
    title.append(caption);
    chapter.append(title, pages);
  });
});
