/* An exercise that is answered with code: an editor in its box, and its test in the page's Python.
 *
 * The editor is loaded when the reader asks for it, the runtime at the first Check. What is written stays in this
 * browser, as `course-exercise:ID` of localStorage; what was checked is an answer of CourseStore.
 */
"use strict";

CourseDesk.exercise = (host) => {
    const { el, button } = CourseDesk;
    const LIMIT = 30; // seconds an answer may run
    const exercise = JSON.parse(host.querySelector("script").textContent);
    const session = CoursePlay.session();
    const loading = CourseDesk.loading(session);
    const store = typeof CourseStore === "undefined" ? null : CourseStore;
    const KEY = `course-exercise:${exercise.id}`;

    const draft = {
        get: () => {
            try {
                return localStorage.getItem(KEY);
            } catch {
                return null;
            }
        },
        set: (text) => {
            try {
                if (text === null) localStorage.removeItem(KEY);
                else localStorage.setItem(KEY, text);
            } catch {
                // nothing can be kept: the text lasts as long as the page
            }
        },
    };

    const room = el("div", { class: "desk-editor" });
    const given = el("pre", {}, el("code", { class: "language-python", tabindex: "0" }, exercise.start.trimEnd()));
    const open = button("Answer here", () => edit(), { "aria-describedby": `answer-${exercise.id}-ask` });
    const check = button("Check", () => run(), { hidden: true });
    const stop = button("Stop", () => session.stop(), { hidden: true });
    const anew = button("Begin anew", () => {
        draft.set(null);
        editor.set(exercise.start);
        show("");
    }, { hidden: true });
    const said = el("span", { class: "desk-said" });
    const out = el("div", { class: "answer-verdict", role: "status" });
    host.querySelector(".answer-command").before(el("div", { class: "desk-block" },
        given, room, el("div", { class: "desk-bar" }, open, check, stop, anew, said), loading.box, out));

    let editor = null;
    async function edit() {
        open.disabled = true;
        const kept = draft.get() ?? againNow() ?? store?.answer(exercise.id)?.given ?? exercise.start;
        editor = await CourseDesk.editor(room, {
            doc: kept, label: `Your answer to exercise ${exercise.id}`,
            onChange: () => {
                draft.set(editor.get());
                session.ready();
            },
        });
        CourseDesk.runsByKey(room, () => run());
        given.hidden = open.hidden = true;
        check.hidden = anew.hidden = false;
        editor.focus();
    }

    /** What a reader begins with when the exercise has come back; null before that. */
    function againNow() {
        return store?.dueAgain(exercise.id) ? exercise.start : null;
    }

    async function run() {
        if (check.disabled) return;
        check.disabled = true;
        stop.hidden = false;
        said.textContent = "Running ...";
        loading.show();
        const code = editor.get();
        try {
            const told = await session.call("python", {
                module: "course.play.judging", function: "judge", timeLimit: LIMIT,
                arguments: { code, test: exercise.test },
            });
            store?.saveAnswer(exercise.id, { given: code, right: told.right, at: new Date().toISOString() });
            draft.set(null);
            verdict(told);
        } catch (error) {
            show("wrong", el("p", {}, error.message === "stopped" ? "Stopped." : error.message));
        }
        said.textContent = "";
        loading.hide();
        stop.hidden = true;
        check.disabled = false;
    }

    function verdict({ right, said: why, line, printed }) {
        const shown = printed ? [el("pre", { class: "desk-printed" }, el("code", { tabindex: "0" }, printed))] : [];
        if (right) {
            show("right", el("p", {}, el("strong", {}, "Right."), " The test passes."), ...shown);
            return;
        }
        const reveal = button("Show an answer", () => {
            reveal.replaceWith();
            out.append(el("pre", {}, el("code", { class: "language-python", tabindex: "0" }, exercise.code.trimEnd())));
        });
        const there = line ? [" ", button(`Go to line ${line}`, () => editor.goTo(line))] : [];
        show("wrong", el("p", {}, el("strong", {}, "Not yet."), ` ${why}`, ...there), ...shown, reveal);
    }

    function show(state, ...lines) {
        if (state) host.dataset.state = state;
        else delete host.dataset.state;
        out.replaceChildren(...lines);
    }

    const before = store?.answer(exercise.id);
    if (draft.get() !== null) open.textContent = "Go on with your answer";
    else if (store?.dueAgain(exercise.id)) open.textContent = "Answer it again";
    else if (before?.right) show("right", el("p", {}, "Right, when you answered it."));
};
