/* Where a reader is: ticks on labs and pages that are done, a bar per phase, and where to go on.
 *
 * A lab is done when its tests passed, here or with `course`; a page when its end was on the screen for a moment.
 * Nothing here is needed to read.
 */
"use strict";

const CoursePlaces = (() => {
    const root = new URL(`./${typeof path_to_root === "string" ? path_to_root : ""}`, location.href);
    const LAB = /^phase-(\d\d)-[^/]+\/labs\/lab-(\d\d)-[^/]+\/index\.html$/;
    const PAGE = /^(phase-\d\d-[^/]+)\/(00-guide|01-deep-dive|02-mini-build|EXERCISES|INTERVIEW|CHEATSHEET)\.html$/;
    const ORDER = ["00-guide", null, "01-deep-dive", "02-mini-build", "EXERCISES", "INTERVIEW", "CHEATSHEET"];
    const STOPPED = "course-place"; // {page, heading}: where the last page was left
    const AT_THE_END = 2000; // milliseconds for which its end is on the screen: then a page counts as read

    const MANY_HEADINGS = 30;

    const store = typeof CourseStore === "undefined" ? null : CourseStore;
    let local = {}; // what `course` says of labs, under `course book serve`

    /** The page of the site behind an address, as "phase-02-paged-attention/00-guide.html". */
    const pageOf = (address) => {
        const url = new URL(address, location.href);
        if (url.origin !== root.origin || !url.pathname.startsWith(root.pathname)) return "";
        const page = decodeURIComponent(url.pathname.slice(root.pathname.length));
        return page === "" || page.endsWith("/") ? `${page}index.html` : page;
    };
    const labOf = (page) => LAB.exec(page)?.slice(1).join("-") ?? "";
    const phaseOf = (page) => (page.startsWith("phase-") ? page.split("/")[0] : "");
    const counts = (page) => LAB.test(page) || PAGE.test(page);
    const here = pageOf(location.href);

    /** What is done, by page; read once for a whole drawing, since the store may be large. */
    const doneNow = () => {
        const results = store?.results() ?? {};
        const pages = store?.pagesRead() ?? {};
        return (page) => {
            const lab = labOf(page);
            return lab ? Boolean(results[lab]?.ok || local[lab]) : page in pages;
        };
    };

    /** Links of the list of pages; those to headings of this page are none. */
    const listed = () => document.querySelectorAll(".sidebar .chapter a[href]:not(.header-in-summary)");

    /** Every page and lab that counts, with its name, in the order in which they are read. */
    const all = (() => {
        const found = new Map();
        for (const link of listed()) {
            const page = pageOf(link.href);
            if (counts(page) && !found.has(page)) found.set(page, link.textContent.trim());
        }
        const place = (page) => ORDER.indexOf(PAGE.exec(page)?.[2] ?? null);
        return [...found]
            .map(([page, name]) => ({ page, name, phase: phaseOf(page) }))
            .sort((a, b) => a.phase.localeCompare(b.phase) || place(a.page) - place(b.page));
    })();

    const stopped = () => {
        try {
            const { page, heading } = JSON.parse(localStorage.getItem(STOPPED));
            return { page: String(page), heading: String(heading ?? "") };
        } catch {
            return { page: "", heading: "" };
        }
    };

    /** Where to go on: the page that was left before its end, else the next that is not done. */
    const next = (done) => {
        const left = stopped();
        const at = all.findIndex((item) => item.page === left.page);
        if (at >= 0 && !done(left.page)) return { ...all[at], heading: left.heading };
        const last = at >= 0 ? at : all.findLastIndex((item) => done(item.page));
        if (last < 0) return null;
        return [...all.slice(last + 1), ...all.slice(0, last)].find((item) => !done(item.page)) ?? null;
    };

    const make = (tag, properties = {}, ...children) => {
        const node = Object.assign(document.createElement(tag), properties);
        node.append(...children);
        return node;
    };

    /** Tick a link, or take its tick away; read aloud as well. */
    const tick = (link, is) => {
        link.classList.toggle("place-done", is);
        link.querySelector(".sr")?.remove();
        if (is) link.append(make("span", { className: "sr", textContent: " (done)" }));
    };

    const bar = (own, done, name) => {
        const count = own.filter((item) => done(item.page)).length;
        const told = `${count} of ${own.length} done`;
        const progress = make("progress", { max: own.length, value: count });
        progress.setAttribute("aria-label", `${name}: ${told}`);
        return make("span", { className: "place-bar" }, progress, make("small", { textContent: told }));
    };

    const onward = (item) => {
        const link = make("a", { className: "place-continue" }, "Continue: ", item.name);
        link.href = new URL(item.page + (item.heading ? `#${item.heading}` : ""), root).href;
        return link;
    };

    const drawSidebar = (done) => {
        for (const link of listed()) {
            const page = pageOf(link.href);
            if (counts(page)) tick(link, done(page));
        }
        for (const part of document.querySelectorAll(".sidebar li.part-title")) {
            part.querySelector(".place-count")?.remove();
            const first = part.nextElementSibling?.querySelector("a[href]");
            const own = first ? all.filter((item) => item.phase && item.phase === phaseOf(pageOf(first.href))) : [];
            const count = own.filter((item) => done(item.page)).length;
            if (!count) continue;
            const told = make("small", { className: "place-count", textContent: ` ${count} of ${own.length}` });
            (part.querySelector("button") ?? part).append(told);
        }
    };

    const drawLanding = (done) => {
        for (const link of document.querySelectorAll(".place-map a")) tick(link, done(pageOf(link.href)));
        for (const step of document.querySelectorAll(".place-map li[data-questions]")) {
            const ids = step.dataset.questions.split(" ");
            const right = ids.filter((id) => store?.answer(id)?.right).length;
            step.querySelector(":scope > .place-right")?.remove();
            const told = make("small", { className: "place-right", textContent: `${right} of ${ids.length} right` });
            if (right) step.append(told);
        }
        for (const now of document.querySelectorAll(".place-now")) {
            const own = all.filter((item) => item.phase === now.dataset.phase);
            const on = next(done);
            now.hidden = !own.some((item) => done(item.page)) && on?.phase !== now.dataset.phase;
            now.replaceChildren(bar(own, done, "This phase"), ...(on ? [onward(on)] : []));
            const start = document.querySelector(".place-start");
            if (start) start.hidden = !now.hidden && on !== null;
        }
    };

    const REVIEWED = { ex: "EXERCISES", bu: "EXERCISES", in: "INTERVIEW" };

    /** Pages on which questions of earlier days are due: [{page, name, count, first}]. */
    const dueNow = () => {
        const found = new Map();
        for (const id of store?.allDue() ?? []) {
            const [phase, kind] = id.split("-");
            const item = all.find(({ page }) => page.startsWith(`phase-${phase}-`) && PAGE.exec(page)?.[2] === REVIEWED[kind]);
            if (!item) continue;
            const entry = found.get(item.page) ?? { ...item, count: 0, first: id };
            entry.count += 1;
            found.set(item.page, entry);
        }
        return [...found.values()];
    };

    /** What comes back today, on the home page and on a phase's own. */
    const drawReview = () => {
        document.querySelector(".place-review")?.remove();
        const phase = phaseOf(here);
        if (here !== "index.html" && !document.querySelector(".place-map")) return;
        const due = dueNow().filter((item) => here === "index.html" || item.phase === phase);
        if (!due.length) return;
        const links = due.flatMap(({ page, name, count, first }) => {
            const link = make("a", { textContent: `${name} (${count})` });
            link.href = new URL(`${page}#answer-${first}`, root).href;
            return [link, ", "];
        });
        const line = make("p", { className: "place-review" }, "Due again today: ", ...links.slice(0, -1), ".");
        (document.querySelector(".place-home") ?? document.querySelector(".home-start, .place-now, main h1"))?.after(line);
    };

    const drawHome = (done) => {
        if (here !== "index.html") return;
        for (const row of document.querySelectorAll("main table tr")) {
            const link = row.querySelector("td:first-child a[href]");
            const page = link ? pageOf(link.href) : "";
            if (!/^phase-[^/]+\/index\.html$/.test(page)) continue;
            const own = all.filter((item) => item.phase === phaseOf(page));
            row.querySelector(".place-bar")?.remove();
            if (own.some((item) => done(item.page))) {
                link.parentElement.append(bar(own, done, link.textContent.trim()));
            }
        }
        const on = next(done);
        document.querySelector(".place-home")?.remove();
        if (!on) return;
        const line = make("p", { className: "place-home" }, onward(on));
        (document.querySelector(".home-start") ?? document.querySelector("main h1"))?.after(line);
    };

    const draw = () => {
        const done = doneNow();
        drawSidebar(done);
        drawLanding(done);
        drawHome(done);
        drawReview();
    };

    /** A page counts as read once its end has been on the screen for a moment. */
    const watchTheEnd = () => {
        const end = document.querySelector(".neighbours");
        if (!end || !PAGE.test(here) || !store) return;
        let waiting = 0;
        const watch = new IntersectionObserver(([entry]) => {
            clearTimeout(waiting);
            if (!entry.isIntersecting) return;
            waiting = setTimeout(() => {
                watch.disconnect();
                if (!store.read(here)) store.saveRead(here);
            }, AT_THE_END);
        });
        watch.observe(end);
    };

    /** Where a page is left, so that the reader can come back to that section. */
    const rememberTheSection = () => {
        if (!counts(here)) return;
        const keep = () => {
            const above = [...document.querySelectorAll("main :is(h2, h3)[id]")].filter(
                (heading) => heading.getBoundingClientRect().top < innerHeight / 2,
            );
            try {
                localStorage.setItem(STOPPED, JSON.stringify({ page: here, heading: above.at(-1)?.id ?? "" }));
            } catch {
                // the browser keeps nothing: then there is no way back either
            }
        };
        keep();
        window.addEventListener("pagehide", keep);
        document.addEventListener("visibilitychange", () => document.hidden && keep());
    };

    /** Labs that have passed with `course` on this machine. */
    const askTheCourse = async () => {
        try {
            const answer = await store?.local?.("progress");
            if (!answer?.ok) return;
            const { labs } = await answer.json();
            const passed = Object.entries(labs).filter(([, lab]) => lab.ok || lab.state === "passed");
            local = Object.fromEntries(passed.map(([lab]) => [lab, true]));
            draw();
        } catch {
            // what is kept in the browser stays
        }
    };

    /** A page of very many headings, as the glossary, is no list for the margin. */
    const shortenThisPage = () => {
        const list = document.querySelector(".sidebar .on-this-page");
        if (!list || list.querySelectorAll("a").length <= MANY_HEADINGS) return;
        for (const inner of list.querySelectorAll("ol ol")) inner.remove();
    };

    /** A list that was hidden could not be scrolled to this page: when it opens, it is. */
    const showThisPage = () => {
        const active = document.querySelector(".sidebar a.active");
        const list = active?.closest("mdbook-sidebar-scrollbox");
        if (!list) return;
        const place = active.getBoundingClientRect().top - list.getBoundingClientRect().top;
        if (place < 0 || place > list.clientHeight - 60) list.scrollTop += place - list.clientHeight / 3;
    };
    document.getElementById("mdbook-sidebar-toggle-anchor")?.addEventListener("change", () => setTimeout(showThisPage));

    document.addEventListener("DOMContentLoaded", () => setTimeout(shortenThisPage));
    rememberTheSection();
    draw();
    watchTheEnd();
    askTheCourse();
    store?.onchange(draw);
    return { pageOf, labOf, counts, draw };
})();
