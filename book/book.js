/* What the theme's own pages lack: for keyboards, screen readers, small screens and paper. */
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

    // The theme turns the page on an arrow key, also where the arrow has something else to move.
    const moved = 'input, select, textarea, [contenteditable], [tabindex="0"], dialog, a.figure';
    document.documentElement.addEventListener("keydown", (event) => {
        if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
        if (event.target.closest(moved) || document.querySelector("dialog[open]")) event.stopPropagation();
    });

    // A figure alone, over the page. Escape, the button and the space beside it close it.
    const enlarge = (link) => {
        const small = link.querySelector("img");
        const large = new Image();
        large.alt = small.alt;
        large.src = link.href;
        large.style.minWidth = `${small.naturalWidth}px`;
        const close = document.createElement("button");
        close.type = "button";
        close.textContent = "Close";
        const room = document.createElement("div");
        room.tabIndex = 0;
        room.setAttribute("role", "region");
        room.setAttribute("aria-label", "The figure; scrolls");
        room.append(large);
        const shown = document.createElement("dialog");
        shown.className = "figure-large";
        shown.setAttribute("aria-label", "Figure");
        shown.append(close, room);
        close.addEventListener("click", () => shown.close());
        room.addEventListener("click", (event) => event.target === room && shown.close());
        shown.addEventListener("keydown", (event) => event.key === "Escape" && shown.close());
        shown.addEventListener("close", () => {
            shown.remove();
            link.focus();
        });
        document.body.append(shown);
        shown.showModal();
    };
    document.addEventListener("click", (event) => {
        const link = event.target.closest("a.figure");
        if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
        event.preventDefault();
        enlarge(link);
    });

    // Where the film plays, its frames need not stand again in the text: they fold, and their title says what they show.
    if (document.querySelector('[data-widget="pool-film"]')) {
        for (const link of document.querySelectorAll('main a.figure[href*="/film-"]')) {
            const fold = document.createElement("details");
            const title = document.createElement("summary");
            title.textContent = link.querySelector("img").alt;
            (link.closest("p") ?? link).replaceWith(fold);
            fold.append(title, link);
        }
    }

    // The list of pages shows the pages of the phase you are in; the others unfold by their title.
    for (const part of document.querySelectorAll(".sidebar li.part-title")) {
        const pages = [];
        for (let next = part.nextElementSibling; next && !next.matches(".part-title"); next = next.nextElementSibling) {
            pages.push(next);
        }
        const button = document.createElement("button");
        button.type = "button";
        button.append(...part.childNodes);
        part.append(button);
        const fold = (open) => {
            button.setAttribute("aria-expanded", open);
            for (const page of pages) page.classList.toggle("folded", !open);
        };
        button.addEventListener("click", () => fold(button.getAttribute("aria-expanded") !== "true"));
        fold(pages.some((page) => page.querySelector("a.active")));
    }
    document.querySelector(".sidebar a.active")?.scrollIntoView({ block: "nearest" });

    // On a published site what was read stays readable offline; a site that is served on this machine keeps nothing.
    const root = typeof path_to_root === "undefined" ? "" : path_to_root;
    if (location.protocol === "https:" && "serviceWorker" in navigator && !document.querySelector('meta[name="course-token"]')) {
        navigator.serviceWorker.register(`${root}offline.js`).then(() => navigator.serviceWorker.ready).then(({ active }) => {
            const loaded = performance.getEntriesByType("resource").map((each) => each.name);
            active.postMessage({ loaded: [location.href.split("#")[0], ...loaded] });
        }).catch(() => {}); // the site works without
    }

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
