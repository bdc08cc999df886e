/* A page you can work in: what the desk of a lab and the blocks of a page share, and who loads them.
 *
 * A page that has a use for it carries this script alone. It loads the other parts, named in `data-parts`, when
 * this site can run Python (`CoursePlay`) or this page came from `course book serve` (`CourseStore.local`); elsewhere
 * the page stays as it is. Nothing runs, and nothing of the runtime is loaded, before the reader asks.
 */
"use strict";

const CourseDesk = (() => {
    const own = document.currentScript;

    /** An HTML element with attributes, listeners (`onclick`) and children; null children are left out. */
    function el(tag, attributes = {}, ...children) {
        const node = document.createElement(tag);
        for (const [name, value] of Object.entries(attributes)) {
            if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
            else if (value === true) node.setAttribute(name, "");
            else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
        }
        node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
        return node;
    }

    const button = (label, onclick, attributes = {}) => el("button", { type: "button", onclick, ...attributes }, label);

    const canRun = () => Boolean(window.CoursePlay?.ready);
    const isServed = () => document.querySelector('meta[name="course-token"]') !== null;

    // ------------------------------------------------------------ the editor

    const isDark = () => ["navy", "coal", "ayu"].some((name) => document.documentElement.classList.contains(name));
    let editors = null; // the promise of the module, null where the site has none

    function editorModule() {
        const play = window.COURSE_PLAY;
        if (!play?.editor) return Promise.resolve(null);
        editors ??= import(new URL(play.base + play.editor, document.baseURI).href).catch(() => null);
        return editors;
    }

    /** An editor in `parent`: {get, set, focus, goTo}. A plain field where the site's own cannot be loaded. */
    async function editor(parent, settings) {
        const module = await editorModule();
        if (!module) return field(parent, settings);
        const make = (doc) => {
            const created = module.createEditor(parent, { ...settings, doc, dark: isDark() });
            parent.querySelector(".cm-content").tabIndex = 0; // what scrolls holds a stop of the keyboard
            return created;
        };
        let made = make(settings.doc);
        let dark = isDark();
        new MutationObserver(() => {
            if (isDark() === dark) return;
            dark = isDark();
            const text = made.get();
            made.destroy();
            made = make(text);
        }).observe(document.documentElement, { attributeFilter: ["class"] });
        return {
            get: () => made.get(),
            set: (text) => made.set(text),
            focus: () => made.focus(),
            goTo: (line) => made.goTo(line),
            destroy: () => made.destroy(),
        };
    }

    function field(parent, { doc, onChange, label }) {
        const area = el("textarea", {
            class: "desk-field", "aria-label": label, spellcheck: "false", autocapitalize: "off", autocomplete: "off",
            wrap: "off", rows: Math.max(3, Math.min(24, doc.split("\n").length)),
            oninput: () => onChange?.(area.value),
        });
        area.value = doc;
        parent.append(area);
        return {
            get: () => area.value,
            set: (text) => void (area.value = text),
            focus: () => area.focus(),
            goTo: (line) => {
                const at = area.value.split("\n").slice(0, line - 1).join("\n").length;
                area.focus();
                area.setSelectionRange(at + (line > 1), at + (line > 1));
                area.scrollTop = (line - 4) * (area.scrollHeight / area.value.split("\n").length);
            },
            destroy: () => area.remove(),
        };
    }

    /** Two texts beside each other, in `parent`. */
    async function difference(parent, before, after) {
        const module = await editorModule();
        if (module) module.createDiff(parent, before, after, { dark: isDark() });
        else parent.append(el("pre", {}, el("code", {}, after)));
    }

    // ------------------------------------------------------------ while it loads and runs

    /** A bar that counts the bytes of the first run; `show()` draws it until the session is ready. */
    function loading(session) {
        const bar = el("progress", { "aria-label": "Loading Python" });
        const text = el("span", {});
        const box = el("p", { class: "desk-load", hidden: true }, bar, " ", text);
        const draw = ({ loaded, total, what }) => {
            box.hidden = session.state !== "loading";
            bar.max = total;
            bar.value = loaded;
            const megabytes = (bytes) => (bytes / 1e6).toFixed(1);
            text.textContent = loaded < total
                ? `Loading ${what}: ${megabytes(loaded)} of ${megabytes(total)} MB, at the first run only.`
                : "Starting Python ...";
        };
        const show = () => {
            session.onprogress = draw;
            if (session.state === "idle" || session.state === "loading") {
                box.hidden = false;
                bar.removeAttribute("value");
                text.textContent = "Loading what runs Python, at the first run only.";
            }
        };
        return { box, show, hide: () => void (box.hidden = true) };
    }

    /** Call `run` on Ctrl-Enter or Cmd-Enter inside `box`, before the editor hears of it. */
    function runsByKey(box, run) {
        box.addEventListener("keydown", (event) => {
            if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
            event.preventDefault();
            event.stopPropagation();
            run();
        }, true);
        // Arrow keys move in the text; the theme would turn the page.
        box.addEventListener("keydown", (event) => event.key.startsWith("Arrow") && event.stopPropagation());
    }

    /** Names a text in few letters: a starter that has changed has another one. */
    function mark(text) {
        let hash = 0x811c9dc5;
        for (let place = 0; place < text.length; place++) {
            hash = Math.imul(hash ^ text.charCodeAt(place), 0x01000193) >>> 0;
        }
        return `${text.length.toString(36)}-${hash.toString(36)}`;
    }

    // ------------------------------------------------------------ starting

    const load = (source) => new Promise((done, failed) => {
        document.head.append(el("script", { src: source, onload: done, onerror: failed }));
    });

    /** The python blocks of a page that run, as `course docs check` finds them: with the output that follows. */
    function runnable(page = document) {
        const fences = [...page.querySelectorAll("main pre > code[class*='language-'], main pre > code")]
            .filter((code) => !code.closest(".upstream, .desk, .desk-block, .answer-box"));
        const language = (code) => /(?:^|\s)language-([\w+-]+)/.exec(code?.className ?? "")?.[1] ?? "";
        return fences.flatMap((code, place) => (language(code) !== "python" ? [] : [{
            code, expected: language(fences[place + 1]) === "text" ? fences[place + 1] : null,
        }]));
    }

    async function start() {
        const host = document.querySelector("main .desk[data-lab]");
        const blocks = canRun() ? runnable() : [];
        if (blocks.length && own.dataset.apart) {
            blocks[0].code.closest("pre").after(el("p", { class: "desk-block" },
                `The blocks of this page run on your machine only: ${own.dataset.apart}.`));
            blocks.length = 0;
        }
        const exercises = canRun() ? [...document.querySelectorAll("main .answer-box[data-code]")] : [];
        const wanted = (host !== null && (canRun() || isServed())) || blocks.length > 0 || exercises.length > 0;
        if (!wanted) return;
        for (const part of own.dataset.parts.split(" ")) await load(part);
        if (host && (canRun() || isServed())) CourseDesk.lab(host);
        for (const each of exercises) CourseDesk.exercise(each);
        if (blocks.length) CourseDesk.blocks(blocks, window.COURSE_PLAY?.pages?.[own.dataset.page] ?? {});
    }
    if (document.readyState === "complete") start();
    else document.addEventListener("DOMContentLoaded", start);

    return { el, button, canRun, isServed, editor, difference, loading, load, runsByKey, mark, runnable };
})();
