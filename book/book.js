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

    // On a phone a long piece of code, an output or a table shows how it begins; a button shows all of it.
    const LONG = 360; // pixels: some fifteen lines, less than half of a screen
    const whole = (box) => {
        if (!box.classList.contains("cut")) return;
        box.classList.remove("cut");
        box.nextElementSibling.remove();
    };
    const cut = (box) => {
        const pieces = box.matches(".upstream") ? [...box.querySelectorAll(":scope > pre")] : [box];
        if (Math.max(...pieces.map((piece) => piece.offsetHeight)) <= LONG) return;
        const rows = box.querySelectorAll("tbody tr").length;
        const lines = (box.querySelector("pre > code") ?? box).textContent.trimEnd().split("\n").length;
        const button = document.createElement("button");
        button.type = "button";
        button.className = "whole";
        button.textContent = rows ? `Show all ${rows} rows` : `Show all ${lines} lines`;
        button.addEventListener("click", () => {
            whole(box);
            box.tabIndex = -1;
            box.focus({ preventScroll: true });
        });
        box.classList.add("cut");
        box.after(button);
    };
    // A page that is still longer than that on a phone shows its sections' titles: a tap opens one, a link or a found
    // word opens its own.
    const LONGEST = 20; // screens
    const OPEN = "course-sections-open";
    const fold = (main) => {
        const sections = [];
        for (const heading of main.querySelectorAll(":scope > h2")) {
            const inside = document.createElement("div");
            inside.className = "in-section";
            inside.setAttribute("hidden", "until-found");
            while (heading.nextElementSibling && !heading.nextElementSibling.matches("h2, .neighbours")) {
                inside.append(heading.nextElementSibling);
            }
            const button = document.createElement("button");
            button.type = "button";
            button.className = "unfold";
            const show = (open) => {
                if (open) inside.removeAttribute("hidden");
                else inside.setAttribute("hidden", "until-found");
                button.setAttribute("aria-expanded", open);
                button.setAttribute("aria-label", `${open ? "Close" : "Open"}: ${heading.innerText.trim()}`);
            };
            heading.after(inside);
            heading.append(button);
            heading.addEventListener("click", (event) => {
                event.preventDefault();
                show(button.getAttribute("aria-expanded") !== "true");
            });
            inside.addEventListener("beforematch", () => show(true));
            sections.push({ heading, inside, show });
        }
        if (!sections.length) return () => {};
        const all = document.createElement("button");
        all.type = "button";
        all.className = "whole";
        const every = (open) => {
            for (const { show } of sections) show(open);
            all.textContent = open ? "Fold the sections" : `Open all ${sections.length} sections`;
            all.setAttribute("aria-expanded", open);
        };
        all.addEventListener("click", () => {
            const open = all.getAttribute("aria-expanded") !== "true";
            every(open);
            try {
                localStorage.setItem(OPEN, open); // for the pages that come
            } catch {
                // nothing may be kept here
            }
        });
        let open = false;
        try {
            open = localStorage.getItem(OPEN) === "true";
        } catch {
            // as above
        }
        every(open);
        sections[0].heading.before(all);
        window.addEventListener("beforeprint", () => every(true));
        return (target) => {
            for (const { heading, inside, show } of sections) {
                if (heading.contains(target) || inside.contains(target)) show(true);
            }
        };
    };
    // The glossary's terms by what is typed: the words stand in the term or in what is said of it.
    if (document.querySelector("main > h1#glossary")) {
        const terms = [...document.querySelectorAll("main > h3")].map((heading) => {
            const nodes = [heading];
            for (let next = heading.nextElementSibling; next && !next.matches("h2, h3, .neighbours"); next = next.nextElementSibling) {
                nodes.push(next);
            }
            return { nodes, text: nodes.map((node) => node.textContent).join(" ").toLowerCase() };
        });
        const label = document.createElement("label");
        label.className = "filter";
        const field = document.createElement("input");
        field.type = "search";
        const count = document.createElement("output");
        label.append("Terms with ", field, count);
        field.addEventListener("input", () => {
            const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
            let left = 0;
            for (const { nodes, text } of terms) {
                const shown = words.every((word) => text.includes(word));
                left += shown;
                for (const node of nodes) node.classList.toggle("filtered", !shown);
            }
            document.querySelector("main").classList.toggle("filtering", words.length > 0);
            count.textContent = words.length ? `${left} of ${terms.length}` : "";
        });
        document.querySelector("main > h1").after(label);
    }

    if (matchMedia("screen and (max-width: 600px)").matches) {
        window.addEventListener("load", () => {
            const main = document.querySelector("main");
            main.querySelectorAll(":scope > :is(pre, .upstream, .table-wrapper)").forEach(cut);
            const long = document.documentElement.scrollHeight > LONGEST * window.innerHeight;
            const unfold = long ? fold(main) : () => {};
            const open = () => {
                const target = document.querySelector(":target"); // a hash may be something else than a name
                if (!target) return;
                unfold(target);
                if (target.closest(".cut")) whole(target.closest(".cut"));
                target.scrollIntoView();
            };
            if (location.hash) open();
            window.addEventListener("hashchange", open);
        });
        document.addEventListener("click", (event) => {
            const shown = event.target.closest(".code-walk")?.closest(".upstream");
            if (shown) whole(shown);
        });
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
