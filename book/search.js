/* The search: a button in the bar, a box over the page, results as one types. Keys: s or / opens, arrows move,
   Enter goes there, Escape closes. Nothing is loaded before it is opened. */
"use strict";

(() => {
    const meta = document.querySelector('meta[name="course-search"]');
    const bar = document.querySelector("#mdbook-menu-bar .left-buttons");
    if (!meta || !bar) return;
    const [, folder, name] = /^(.*)index-(\w+)\.js$/.exec(meta.content);
    const root = new URL(`./${typeof path_to_root === "string" ? path_to_root : ""}`, location.href);
    const PAUSE = 100; // milliseconds without a key before a search
    const AROUND = 30; // words of a quotation

    CourseSearch.load = (file) =>
        new Promise((resolve, reject) => {
            const script = document.createElement("script");
            script.src = new URL(folder + file, root).href;
            script.onload = resolve;
            script.onerror = () => {
                script.remove();
                reject(new Error(`${file} could not be loaded`));
            };
            document.head.append(script);
        });

    const make = (tag, properties = {}, ...children) => {
        const node = Object.assign(document.createElement(tag), properties);
        node.append(...children);
        return node;
    };

    // ------------------------------------------------------------ words that are met

    const stemsOf = (query) => new Set(CourseSearch.words(query).map(([word]) => word));

    /** Whether a word of a text is one that was asked for, or begins with one. */
    const meets = (word, stems, query) => {
        const own = CourseSearch.words(word);
        const last = query.trim().split(/\s+/).at(-1).toLowerCase();
        return own.some(([each]) => stems.has(each)) || (last.length > 2 && word.toLowerCase().startsWith(last));
    };

    /** The words of `text` around the most of those that are asked for, as nodes. */
    const quotation = (text, query) => {
        const stems = stemsOf(query);
        const all = text.split(" ");
        const hits = all.map((word) => meets(word, stems, query));
        let best = 0;
        let most = -1;
        for (let from = 0; from < Math.max(1, all.length - AROUND + 1); from += 1) {
            const count = hits.slice(from, from + AROUND).filter(Boolean).length;
            if (count > most) [best, most] = [from, count];
            if (from > 2000) break; // of a very long section the beginning will do
        }
        const nodes = [best > 0 ? "\u2026 " : ""];
        for (let i = best; i < Math.min(all.length, best + AROUND); i += 1) {
            nodes.push(hits[i] ? make("mark", { textContent: all[i] }) : all[i], " ");
        }
        if (best + AROUND < all.length) nodes.push("\u2026");
        return nodes;
    };

    // ------------------------------------------------------------ the box

    const input = make("input", { type: "search", id: "course-searchbar", placeholder: "Search the course",
        autocomplete: "off", spellcheck: false });
    input.autocapitalize = "off";
    input.setAttribute("aria-label", "Search the course");
    input.setAttribute("aria-controls", "course-searchresults");
    input.setAttribute("aria-describedby", "course-searchstatus");
    const close = make("button", { type: "button", textContent: "Close" });
    const status = make("p", { id: "course-searchstatus" });
    status.setAttribute("role", "status");
    const list = make("ul", { id: "course-searchresults" });
    const form = make("form", { role: "search" }, input, close);
    const box = make("dialog", { className: "course-search" }, form, status, list);
    box.setAttribute("aria-label", "Search");

    const icon = `<span class="fa-svg"><svg viewBox="0 0 24 24" aria-hidden="true"><path fill="none"
        stroke="currentColor" stroke-width="3" stroke-linecap="round" d="M16.5 10a7 7 0 1 1-14 0 7 7 0 1 1 14 0zM15 15l7
        7"/></svg></span>`;
    const button = make("button", { type: "button", className: "icon-button", id: "course-search-toggle",
        title: "Search (s or /)", innerHTML: icon });
    button.setAttribute("aria-label", "Search");
    button.setAttribute("aria-haspopup", "dialog");
    button.setAttribute("aria-keyshortcuts", "/ s");
    bar.append(button);

    const address = (result, query) => {
        const url = new URL(result.path, root);
        url.searchParams.set("highlight", query);
        if (result.anchor) url.hash = result.anchor;
        return url.href;
    };

    const row = (result, query) => {
        const link = make("a", { href: address(result, query) });
        const more = result.title === result.crumb ? [] : [make("small", { textContent: result.crumb })];
        link.append(make("strong", { textContent: result.title }), ...more);
        const quote = make("p");
        CourseSearch.textOf(result).then((text) => quote.append(...quotation(text, query)), () => {});
        return make("li", {}, link, quote);
    };

    let asked = 0;
    let pending = 0;
    const search = async () => {
        const query = input.value.trim();
        const own = (asked += 1);
        if (query.length < 2) {
            list.replaceChildren();
            status.textContent = "";
            return;
        }
        if (!list.children.length) status.textContent = "Searching\u2026";
        let results;
        try {
            results = await CourseSearch.find(query, name);
        } catch {
            if (own === asked) status.textContent = "The search could not be loaded. Type again to try once more.";
            return;
        }
        if (own !== asked) return;
        const count = results.length;
        status.textContent = `${count || "No"} result${count === 1 ? "" : "s"} for \u201c${query}\u201d`;
        list.replaceChildren(...results.map((result) => row(result, query)));
        list.scrollTop = 0;
    };
    const soon = () => {
        clearTimeout(pending);
        pending = setTimeout(search, PAUSE);
    };

    const open = () => {
        if (box.open || document.querySelector("dialog[open]")) return;
        if (!box.isConnected) document.body.append(box);
        box.showModal();
        input.focus();
        input.select();
        CourseSearch.open(name).catch(() => {});
    };

    button.addEventListener("click", open);
    close.addEventListener("click", () => box.close());
    box.addEventListener("click", (event) => event.target === box && box.close());
    input.addEventListener("input", soon);
    form.addEventListener("submit", async (event) => {
        event.preventDefault();
        clearTimeout(pending);
        if (pending) await search();
        list.querySelector("a")?.click();
    });
    list.addEventListener("click", (event) => event.target.closest("a") && box.close());
    box.addEventListener("keydown", (event) => {
        if (event.key === "Escape") {
            event.preventDefault(); // a search field would only be emptied
            box.close();
        }
        if (!["ArrowDown", "ArrowUp"].includes(event.key)) return;
        const stops = [input, ...list.querySelectorAll("a")];
        const to = stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
        if (to >= 0 && to < stops.length) stops[to].focus();
        event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
        if (event.altKey || event.ctrlKey || event.metaKey || event.isComposing || event.defaultPrevented) return;
        const writing = event.target.closest?.("input, textarea, select, [contenteditable]");
        if (writing || (event.key !== "s" && event.key !== "S" && event.key !== "/")) return;
        event.preventDefault();
        open();
    });

    // ------------------------------------------------------------ the words that led to a page

    const mark = () => {
        const query = new URLSearchParams(location.search).get("highlight");
        if (!query || typeof Highlight === "undefined") return;
        const stems = stemsOf(query);
        const ranges = [];
        const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
            const text = walk.currentNode;
            if (text.parentElement.closest("script, style, math")) continue;
            for (const met of text.data.matchAll(/[\p{L}\p{N}]+(?:[_.-][\p{L}\p{N}]+)*/gu)) {
                if (!CourseSearch.words(met[0]).some(([word]) => stems.has(word))) continue;
                const range = new Range();
                range.setStart(text, met.index);
                range.setEnd(text, met.index + met[0].length);
                ranges.push(range);
            }
        }
        CSS.highlights.set("course-search", new Highlight(...ranges));
        document.addEventListener("keydown", (event) => event.key === "Escape" && CSS.highlights.clear());
    };
    mark();
})();
