/* The home page: the recorded run plays once by itself, and "Run it yourself" brings the live engine. Loads nothing but
 * itself until it is asked to. The document is `given` of course/site/home.py.
 */
"use strict";

(() => {
    const LINK = /^#live=/;

    // ------------------------------------------------------------ the picture moves

    function playOnce(host) {
        const box = host.querySelector("section.widget-box");
        const button = [...box.querySelectorAll("button")].find((each) => each.textContent === "Play");
        const speed = box.querySelector(".widget-speed");
        const says = box.querySelector("[aria-live]");
        if (!button || matchMedia("(prefers-reduced-motion: reduce)").matches || !("IntersectionObserver" in window)) return;
        const own = new Set();
        const left = (event) => { // whoever takes hold of it has it
            if (event.isTrusted === false) return;
            if (button.textContent === "Pause" && event.target !== button) button.click();
            ended();
        };
        const ended = () => {
            says.setAttribute("aria-live", "polite");
            speed.value = "1";
            for (const name of own) box.removeEventListener(name, left, true);
        };
        const seen = new IntersectionObserver((entries) => {
            if (!entries.some((entry) => entry.isIntersecting) || document.hidden) return;
            seen.disconnect();
            says.setAttribute("aria-live", "off"); // a picture that moves by itself says nothing
            speed.value = "0.5";
            button.click();
            for (const name of ["pointerdown", "keydown"]) {
                own.add(name);
                box.addEventListener(name, left, true);
            }
        }, { threshold: 0.4 });
        seen.observe(box);
    }

    // ------------------------------------------------------------ the live engine

    function load(path) {
        return new Promise((resolve, reject) => {
            const css = path.endsWith(".css");
            const node = document.createElement(css ? "link" : "script");
            if (css) node.rel = "stylesheet";
            node[css ? "href" : "src"] = path;
            node.onload = resolve;
            node.onerror = () => reject(new Error(`${path} could not be loaded`));
            document.head.append(node);
        });
    }

    function offer(host, given) {
        const { el } = CourseWidgets;
        const recorded = host.querySelector("section.widget-box");
        const note = el("p", { class: "home-note", role: "status" });
        const linked = () => LINK.test(location.hash);
        if (!window.CoursePlay?.ready) {
            if (linked()) {
                note.textContent = "The link leads to a state of the live engine, which this copy of the site has not got.";
                host.prepend(note);
            }
            return;
        }
        let live = null;
        const megabytes = Math.round(given.bytes / 1e6);
        const run = el("button", { type: "button", class: "home-run", onclick: () => begin("") },
            `Run it yourself (loads ${megabytes} MB)`);
        const row = el("div", { class: "widget-box home-offer" },
            el("p", {}, run, el("span", {}, " Your prompts, your budget, your blocks: the same engine decides in this page.")), note);
        host.append(row);

        async function begin(fragment) {
            run.disabled = true;
            note.textContent = "";
            try {
                if (!live) {
                    const up = given.up;
                    await load(`${up}book/widgets/live.css`);
                    for (const name of ["views", "form", "real", "engine"]) await load(`${up}book/widgets/live-${name}.js`);
                    live = CourseLive.build(host, given);
                }
                const pause = [...recorded.querySelectorAll("button")].find((each) => each.textContent === "Pause");
                pause?.click();
                recorded.hidden = row.hidden = true;
                live.box.hidden = false;
                live.box.scrollIntoView({ block: "nearest" });
                if (!(await live.open(fragment))) {
                    note.textContent = live.box.querySelector(".live-trouble").textContent;
                    recorded.hidden = row.hidden = false;
                    live.box.hidden = true;
                }
            } catch (error) {
                note.textContent = error.message;
            }
            run.disabled = false;
        }
        if (linked()) begin(location.hash);
        window.addEventListener("hashchange", () => linked() && begin(location.hash));
    }

    const start = () => {
        const data = document.getElementById("course-live");
        const host = document.querySelector('[data-widget="engine-timeline"]');
        if (!data || !host) return;
        const given = JSON.parse(data.textContent);
        offer(host, given);
        playOnce(host);
    };
    // After the widget has drawn itself and the site's own scripts are there.
    if (document.readyState === "complete") start();
    else window.addEventListener("load", start);
})();
