/* Repairs for keyboards and screen readers that the theme's own pages lack. */
"use strict";

(() => {
    // The theme's menu button is a label with aria-expanded, which only a button may have.
    document.getElementById("mdbook-sidebar-toggle")?.setAttribute("role", "button");

    // What scrolls sideways must be reachable by keyboard; what does not must not be a stop.
    const scrolling = () => {
        for (const box of document.querySelectorAll(".content pre > code, .content .table-wrapper, math")) {
            if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
            else box.removeAttribute("tabindex");
        }
    };
    scrolling();
    window.addEventListener("resize", scrolling);
    window.addEventListener("load", scrolling);

    // A printed page has no folds: open the answers for it, and close them again.
    const opened = [];
    window.addEventListener("beforeprint", () => {
        for (const fold of document.querySelectorAll(".content details:not([open])")) {
            fold.open = true;
            opened.push(fold);
        }
    });
    window.addEventListener("afterprint", () => {
        for (const fold of opened.splice(0)) fold.open = false;
    });
})();
