/* What all widgets share: building elements, mounting, and a stepper.
 *
 * A page holds <div class="widget" data-widget="NAME"> with a figure inside and, after it, a
 * <script type="application/json"> with the document of its module in course/site/widgets. Without JavaScript the
 * figure stays. No network, no storage, nothing global but `CourseWidgets`.
 */
"use strict";

const CourseWidgets = (() => {
    const SVG = "http://www.w3.org/2000/svg";
    const formulas = {};

    /** An HTML element with attributes and children; null children are left out. */
    function el(tag, attributes = {}, ...children) {
        return fill(document.createElement(tag), attributes, children);
    }

    /** The same for SVG. */
    function svg(tag, attributes = {}, ...children) {
        return fill(document.createElementNS(SVG, tag), attributes, children);
    }

    function fill(node, attributes, children) {
        for (const [name, value] of Object.entries(attributes)) {
            if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
            else if (value !== null && value !== undefined) node.setAttribute(name, value);
        }
        node.append(...children.flat(Infinity).filter((child) => child !== null));
        return node;
    }

    /** A whole number with thousands separated, the same in every language. */
    const count = (value) => Math.round(value).toLocaleString("en-US");

    /** A number with its noun: 1 token, 2 tokens. */
    const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

    const LEAST = 11.1; // pixels: smaller letters cannot be read on a phone
    /** Tell the style of an SVG how large a letter must be in its own units: `--least`. */
    const legible = (plot) => {
        const scale = plot.clientWidth / (plot.viewBox.baseVal?.width || plot.clientWidth);
        if (scale > 0) plot.style.setProperty("--least", `${(LEAST / scale).toFixed(2)}px`);
    };
    const resized = "ResizeObserver" in window
        ? new ResizeObserver((entries) => entries.forEach(({ target }) => legible(target))) : null;
    const redrawn = new MutationObserver((records) => records.forEach(({ target }) => legible(target)));

    /** Units across a plot, drawn one to a pixel where there is less room than `most`; `redraw()` when that changes. */
    function room(most, redraw) {
        const now = () => Math.round(Math.max(280, Math.min(most, (document.querySelector("main")?.clientWidth || most) - 32)));
        let last = now();
        window.addEventListener("resize", () => {
            if (now() === last) return;
            last = now();
            redraw();
        });
        return now;
    }

    /** Replace the figure of every widget called `name` by what `draw(document)` returns. */
    function mount(name, draw) {
        const start = () => {
            for (const host of document.querySelectorAll(`[data-widget="${name}"]`)) {
                const data = host.querySelector('script[type="application/json"]');
                const drawn = draw(JSON.parse(data.textContent));
                // Each says first what it is: its own title, or else the name that a screen reader hears.
                const named = drawn.getAttribute("aria-label");
                if (named && !drawn.querySelector(".widget-title, .first-ask")) {
                    drawn.prepend(el("p", { class: "widget-title", "aria-hidden": "true" }, named));
                }
                for (const child of host.children) child.hidden = true;
                host.append(drawn);
                for (const plot of drawn.querySelectorAll("svg[viewBox]")) {
                    legible(plot);
                    resized?.observe(plot);
                    redrawn.observe(plot, { attributeFilter: ["viewBox"] });
                }
                host.dataset.ready = "yes";
            }
        };
        if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
        else start();
    }

    /** Buttons, a slider and the arrow keys over `length` places; calls `show(place)` on a move.
     *
     * `box` is what the keys work in; `from` is what the first place is called. Returns the row of controls and a function to go somewhere.
     */
    function stepper(box, length, noun, show, from = 1) {
        let place = 0;
        let timer = null;
        const button = (label, title, action) =>
            el("button", { type: "button", title, "aria-label": title, onclick: action }, label);
        const slider = el("input", {
            type: "range", min: 0, max: length - 1, value: 0, "aria-label": noun,
            oninput: () => go(Number(slider.value)),
        });
        const where = el("output", { class: "widget-place" });
        const first = button("|◀", `First ${noun}`, () => go(0));
        const back = button("◀", `Previous ${noun}`, () => go(place - 1));
        const play = button("Play", `Play every ${noun}`, () => (timer ? stop() : run()));
        const next = button("▶", `Next ${noun}`, () => go(place + 1));
        const speed = el("select", { class: "widget-speed", "aria-label": "Speed", onchange: () => timer && start() },
            [0.5, 1, 2, 4].map((times) => el("option",
                { value: times, selected: times === 1 ? "" : null }, `${times}×`)));
        const last = button("▶|", `Last ${noun}`, () => go(length - 1));

        function go(target) {
            place = Math.max(0, Math.min(length - 1, target));
            slider.value = place;
            where.textContent = from === 1 ? `${noun} ${place + 1} of ${length}`
                : `${noun} ${place + from}, ${from} to ${length - 1 + from}`;
            slider.setAttribute("aria-valuetext", where.textContent);
            box.dataset.place = place;
            first.disabled = back.disabled = place === 0;
            next.disabled = last.disabled = place === length - 1;
            if (place === length - 1) stop();
            show(place);
        }
        function run() {
            if (place === length - 1) go(0);
            named("Pause");
            start();
        }
        function start() {
            clearInterval(timer);
            timer = setInterval(() => go(place + 1), 1200 / Number(speed.value));
        }
        function stop() {
            clearInterval(timer);
            timer = null;
            named("Play");
        }
        /** What the button says, and the name that it is read by, which begins with that. */
        function named(label) {
            play.textContent = label;
            play.title = `${label}${label === "Play" ? ` every ${noun}` : ""}`;
            play.setAttribute("aria-label", play.title);
        }
        box.addEventListener("keydown", (event) => {
            // mdBook turns pages with the arrow keys; inside a widget they move the widget.
            const moves = { ArrowLeft: -1, ArrowRight: 1 };
            if (event.key in moves) {
                event.preventDefault();
                event.stopPropagation();
                stop();
                go(place + moves[event.key]);
            }
        });
        const row = el("div", { class: "widget-controls", role: "group", "aria-label": "Controls" },
            first, back, play, next, last, speed, slider, where);
        return [row, go];
    }

    /** A line under a box that says, where it is so, that the box scrolls sideways. */
    function sideways(box) {
        const said = el("p", { class: "widget-hint", hidden: "" }, "The table scrolls sideways.");
        const look = () => { said.hidden = box.scrollWidth <= box.clientWidth; };
        if ("ResizeObserver" in window) for (const each of [box, ...box.children]) new ResizeObserver(look).observe(each);
        return said;
    }

    /** A labelled field; `field` is an input or a select. */
    function labelled(text, field, unit = "") {
        return el("label", { class: "widget-field" }, el("span", {}, text), field,
            unit ? el("span", { class: "widget-unit" }, unit) : null);
    }

    /** A select over names. */
    function choice(names, chosen, changed) {
        return el("select", { onchange: changed },
            names.map((name) => el("option", name === chosen ? { selected: "" } : {}, name)));
    }

    /** Questions to be answered with a number before `set(posed)` shows what is so.
     *
     * `posed` has `ask`, `answer` and, perhaps, `because`; `verb` is the button's text. Returns a list of one element.
     */
    function questions(list, verb, set) {
        let asked = 0;
        const guess = el("input", { type: "number", min: 0, inputmode: "numeric", "aria-label": "Your guess",
            onkeydown: (event) => {
                if (event.key !== "Enter") return;
                event.preventDefault();
                answer();
            } });
        guess.dataset.input = "guess";
        const number = el("b", {});
        const question = el("span", {});
        const reply = el("p", { class: "knob-reply decide-reply", "aria-live": "polite" });

        function ask(place) {
            asked = place % list.length;
            number.textContent = `Predict (${asked + 1} of ${list.length}). `;
            question.textContent = list[asked].ask;
            guess.value = "";
            reply.textContent = "";
        }
        function answer() {
            const posed = list[asked];
            if (guess.value === "") {
                reply.textContent = "Say a number first.";
                return;
            }
            set(posed);
            reply.textContent = (Number(guess.value) === posed.answer ? `${posed.answer}, as you said.`
                : `${posed.answer}; you said ${guess.value}.`) + (posed.because ? ` ${posed.because}` : "");
        }
        ask(0);
        return [el("div", { class: "decide-ask" }, el("p", {}, number, question), el("p", { class: "knob-ask decide-choices" }, guess,
            el("button", { type: "button", onclick: answer }, verb),
            el("button", { type: "button", class: "decide-next", onclick: () => ask(asked + 1) }, "Next question")), reply)];
    }

    /** A module of the course that runs in this page; null where the site was built without what runs it.
     *
     * `call(name, given)` resolves to what the function returns, or throws an Error with its own words; `offer(verb)` says what a
     * first call loads; `box` shows how far that is and belongs into the widget.
     */
    function inPage(module, bytes) {
        if (!window.CoursePlay?.ready) return null;
        const session = window.CoursePlay.session();
        const bar = el("progress", { max: 1, value: 0, "aria-label": "Loading" });
        const text = el("span", {});
        const box = el("p", { class: "run-loading", role: "status", hidden: "" }, bar, text,
            el("button", { type: "button", onclick: () => session.stop() }, "Stop"));

        async function call(name, given) {
            const heard = session.onprogress;
            bar.removeAttribute("value");
            text.textContent = session.state === "idle" ? "Loading Python." : "The engine is running.";
            session.onprogress = ({ loaded, total, what }) => {
                bar.max = Math.max(total, bytes);
                bar.value = loaded;
                text.textContent = `${(loaded / 1e6).toFixed(1)} of about ${(bar.max / 1e6).toFixed(0)} MB: ${what}`;
            };
            const slow = setTimeout(() => { box.hidden = false; }, session.state === "ready" ? 400 : 0);
            try {
                return await session.call("python", { module, function: name, arguments: given });
            } catch (error) {
                throw new Error(error.message === "stopped" ? "Stopped." : error.message.replace(/^[\w.]*Error: /, ""));
            } finally {
                clearTimeout(slow);
                box.hidden = true;
                session.onprogress = heard;
            }
        }
        const offer = (verb) => (session.state === "idle" ? `${verb} (loads ${Math.round(bytes / 1e6)} MB)` : verb);
        return { call, offer, box };
    }

    return { el, svg, count, plural, room, mount, stepper, sideways, labelled, choice, questions, inPage, formulas };
})();
