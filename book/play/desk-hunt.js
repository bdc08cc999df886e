/* "Hunt" of a lab's desk: the reference with one wrong line, to be mended, or told apart by tests of the reader's own.
 *
 * Loaded when the fold is opened first. What is drawn and told is course/play/hunting.py's; the line, and what it stands
 * for, are asked for only when it was found. What is written is kept by `CourseStore.saveHunt`.
 */
"use strict";

/** Fill the fold `box`; `session` runs Python, `skip` are the lab's tests that no page runs. */
CourseDesk.hunt = ({ box, lab, skip, session }) => {
    const { el, button } = CourseDesk;
    const LIMITS = { 1: 120, 2: 120, 3: 300 }; // seconds
    const TELLS = { 1: "with the message of the test that fails", 2: "with the calls that led to it, and nothing of the test",
        3: "write tests that tell wrong solutions from the right one" };
    const DRAWS = 20; // seeds tried until a line fails a test that this page runs
    let hunt = CourseStore.hunt(lab);
    let editor = null;
    let timer = 0;

    const levels = el("select", { "aria-label": "Level of the hunt" }, Object.entries(TELLS).map(([level, tells]) =>
        el("option", { value: level, selected: Number(level) === (hunt?.level ?? 1) }, `Level ${level}: ${tells}`)));
    const another = button("Begin", () => begin());
    const stop = button("Stop", () => session.stop(), { hidden: true });
    const heading = el("p", {});
    const evidence = el("div", {});
    const place = el("div", { class: "desk-editor", hidden: true });
    const check = button("Check", () => grade(), { class: "desk-run", hidden: true });
    const verdict = el("p", { class: "desk-verdict", role: "status" });
    const told = el("div", {});
    const loading = CourseDesk.loading(session);
    box.append(
        el("p", {}, "One line is wrong, as somebody once wrote it. Nothing here says which, or why, before you have found it. "
            + "At level 3 you write the tests, and every wrong solution that is known of this lab is tried on them."),
        el("p", { class: "desk-bar" }, levels, another, stop), loading.box, heading, evidence, place,
        el("p", { class: "desk-bar" }, check), verdict, told);
    box.addEventListener("keydown", (event) => { // before the desk's own key, which runs the lab
        if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || !place.contains(event.target)) return;
        event.preventDefault();
        event.stopPropagation();
        grade();
    }, true);
    if (hunt) resume();

    const python = (name, given) => session.call("python", { module: "course.play.hunting", function: name, arguments: given });
    const late = ({ message }) => (message === "stopped" ? "Stopped." : message.replace(/^[\w.]*Error: /, ""));

    function busy(on) {
        for (const each of [another, check, levels]) each.disabled = on;
        stop.hidden = !on;
        if (on) loading.show();
        else loading.hide();
    }
    const clear = () => [evidence, told, verdict, heading].forEach((each) => each.replaceChildren());

    async function edit(text) {
        place.hidden = check.hidden = false;
        if (editor) return editor.set(text);
        const label = `the text of the hunt in lab ${lab}`;
        editor = await CourseDesk.editor(place, { doc: text, label, onChange: () => {
            clearTimeout(timer);
            timer = setTimeout(keep, 400);
        } });
    }
    function keep() {
        clearTimeout(timer);
        if (!hunt || !editor) return;
        try {
            hunt = { ...hunt, text: editor.get() };
            CourseStore.saveHunt(lab, hunt);
        } catch (error) {
            verdict.textContent = `Not kept in this browser: ${error.message}.`;
        }
    }
    window.addEventListener("pagehide", () => timer && keep());

    function introduce() {
        heading.replaceChildren(el("b", {}, `Level ${hunt.level}, seed ${hunt.seed}. `), hunt.level === 3
            ? "Write tests that pass on the reference and fail on as many wrong solutions as you can."
            : "One line of this text is wrong. Mend it.", " In a checkout the same is ",
            el("code", {}, `course hunt ${lab} --level ${hunt.level} --seed ${hunt.seed}`), ".");
        another.textContent = "Begin another";
    }

    async function resume() {
        introduce();
        await edit(hunt.text);
        if (hunt.found) verdict.textContent = hunt.level === 3 ? `${hunt.score} of ${hunt.of} wrong solutions caught, at best.`
            : `Found, with ${counted(hunt.checks)}.`;
        else if (hunt.level < 3) evidence.append(button("Show again what is known of it", () => show()));
    }
    const counted = (checks) => `${checks} check${checks === 1 ? "" : "s"}`;

    // ------------------------------------------------------------ beginning

    async function begin() {
        keep();
        clear();
        busy(true);
        const level = Number(levels.value);
        try {
            for (let draw = 1; ; draw++) {
                const seed = Math.floor(Math.random() * 1e6);
                const drawn = await python("begin", { lab, level, seed });
                const shown = level === 3 ? [] : await evidenceOf(drawn, level);
                if (!shown && draw < DRAWS) continue; // that line shows in no test that a page runs
                if (!shown) throw new Error("no line was drawn that fails a test here");
                hunt = { level, seed, text: drawn.text, began: new Date().toISOString(), checks: 0, found: "", score: 0, of: drawn.of ?? 0 };
                CourseStore.saveHunt(lab, hunt);
                introduce();
                evidence.append(...shown);
                await edit(drawn.text);
                break;
            }
        } catch (error) {
            verdict.textContent = late(error);
        }
        busy(false);
    }

    async function show() {
        evidence.replaceChildren();
        busy(true);
        try {
            const drawn = await python("begin", { lab, level: hunt.level, seed: hunt.seed });
            evidence.append(...((await evidenceOf(drawn, hunt.level)) ?? []));
        } catch (error) {
            verdict.textContent = late(error);
        }
        busy(false);
    }

    /** What a drawn text shows: the failure at level 1, the calls at level 2; null when it fails no test here. */
    async function evidenceOf({ run, tests }, level) {
        if (tests.some((test) => test in skip)) return null;
        const report = CourseReport.begun();
        const payload = { lab, impl: "solution", files: { "solution.py": run }, tests, timeLimit: LIMITS[level] };
        try {
            CourseReport.ended(report, await session.call("grade", payload, (event) => CourseReport.heard(report, event)));
        } catch (error) {
            if (!error.message.startsWith("out of time")) throw error;
            return [el("p", {}, "It never ends.")];
        }
        const [failed] = CourseReport.failed(report);
        if (!failed) return null;
        if (level === 1) return explained(failed);
        const calls = await python("calls", { lab, printed: failed.printed ?? "" });
        if (!calls.length) return [el("p", {}, `${failed.error}, before any of the lab's own calls returned.`)];
        return [el("p", {}, `The last ${calls.length === 1 ? "call" : `${calls.length} calls`} before something was found to be wrong:`),
            el("pre", {}, el("code", { tabindex: "0" }, calls.join("\n")))];
    }

    const explained = (failed) => [el("p", {}, el("code", {}, CourseReport.label(failed))),
        ...CourseReport.explain(failed).map(({ text, kind }) => el("p", { class: `desk-${kind}` }, text.trim()))];

    // ------------------------------------------------------------ checking

    async function grade() {
        if (!hunt || check.disabled) return;
        keep();
        verdict.className = "desk-verdict";
        verdict.textContent = "Checking ...";
        told.replaceChildren();
        busy(true);
        hunt.checks += 1;
        try {
            await (hunt.level === 3 ? score() : mended());
        } catch (error) {
            verdict.textContent = `${late(error)} Not yet. ${counted(hunt.checks)} so far.`;
        }
        busy(false);
        try {
            CourseStore.saveHunt(lab, hunt);
        } catch { /* keep() has said it */ }
    }

    async function mended() {
        const report = CourseReport.begun();
        const payload = { lab, impl: "solution", files: { "solution.py": editor.get() }, timeLimit: LIMITS[1] };
        CourseReport.ended(report, await session.call("grade", payload, (event) => CourseReport.heard(report, event)));
        const failed = CourseReport.failed(report);
        if (!CourseReport.ok(report)) {
            const why = failed.length ? `${failed.length} of ${report.results.length} tests fail.` : report.trouble;
            verdict.textContent = `${why} Not yet. ${counted(hunt.checks)} so far.`;
            verdict.classList.add("desk-bad");
            if (failed.length && hunt.level === 1) told.append(...explained(failed[0]));
            return;
        }
        const it = await python("found", { lab, seed: hunt.seed });
        hunt.found ||= new Date().toISOString();
        verdict.textContent = `Found, with ${counted(hunt.checks)}.`;
        verdict.classList.add("desk-good");
        told.append(el("p", {}, `Line ${it.line} said: `), el("pre", {}, el("code", { tabindex: "0" }, it.wrong)),
            el("p", {}, "and the reference says:"), el("pre", {}, el("code", { tabindex: "0" }, it.right)),
            el("p", {}, "Whoever wrote it thought: ", el("q", {}, it.why)));
    }

    async function score() {
        const by = new Map(); // number of a solution -> its outcomes; 0 is the reference
        let first = "";
        let trouble = "";
        const hear = (event) => {
            if (event.event === "collect-error") trouble = event.message;
            if (event.event !== "result") return;
            const number = Number(event.variant);
            by.set(number, [...(by.get(number) ?? []), event.outcome]);
            if (number === 0 && event.outcome !== "passed") first ||= `${event.name}: ${(event.message || event.error || "").split("\n")[0]}`;
            verdict.textContent = `${by.size} solutions tried ...`;
        };
        await session.call("grade", { lab, impl: "solution", hunt: editor.get(), timeLimit: LIMITS[3] }, hear);
        verdict.classList.add("desk-bad");
        if (first || !by.has(0)) {
            verdict.textContent = first ? `A test of yours fails on the reference, so it tells nothing: ${first}`
                : trouble || "No test of yours takes lab, the module under test.";
            return;
        }
        const caught = [...by].filter(([number, outcomes]) => number > 0 && outcomes.includes("failed")).map(([number]) => number);
        hunt.of = by.size - 1;
        hunt.score = Math.max(hunt.score, caught.length);
        if (caught.length) hunt.found ||= new Date().toISOString();
        verdict.classList.toggle("desk-bad", !caught.length);
        verdict.classList.toggle("desk-good", caught.length > 0);
        verdict.textContent = `${caught.length} of ${hunt.of} wrong solutions caught.`;
        const why = await python("thoughts", { lab, numbers: caught });
        told.append(el("ul", {}, why.map((each) => el("li", {}, `Caught: ${each}`))));
        const missed = hunt.of - caught.length;
        if (missed) told.append(el("p", {}, `${missed} wrong solution${missed === 1 ? " passes" : "s pass"} your tests.`));
    }
};
