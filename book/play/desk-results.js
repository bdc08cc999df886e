/* What a grading shows: the tests as they run, the first to mend, hints, and what comes after passing. */
"use strict";

/** The part of a desk below its editor: {box, begin, heard, end, rest}.
 *
 * `data` is the lab's document, `goTo(line)` moves the editor, `text()` is what stands in it, `solution()` fetches
 * the reference, `predicted` shows what was predicted, where the lab asks.
 */
CourseDesk.results = ({ data, goTo, text, solution, predicted }) => {
    const { el, button } = CourseDesk;
    const unfolded = new Map(); // test and its fields -> hints shown
    let states = new Map(); // test id -> its square and its row
    let passed = false;

    const verdict = el("p", { class: "desk-verdict" });
    const squares = el("p", { class: "desk-squares", "aria-hidden": "true" });
    const first = el("div", { class: "desk-first" });
    const list = el("ol", { class: "desk-list" });
    const all = el("details", { class: "desk-all", hidden: true }, el("summary", {}, "All tests"), list);
    const after = el("div", { class: "desk-after" });
    const reference = el("details", { class: "desk-reference" });
    const live = el("div", { role: "status" }, verdict);
    const box = el("div", { class: "desk-results" }, live, squares, first, predicted, after, all, reference);

    // ------------------------------------------------------------ while it runs

    function begin() {
        live.setAttribute("aria-live", "off"); // until the end: not every test is read out
        verdict.textContent = "Starting ...";
        verdict.className = "desk-verdict";
        for (const each of [squares, first, after, list]) each.replaceChildren();
        states = new Map();
        all.hidden = true;
    }

    function heard(event, report) {
        if (event.event === "collected") {
            for (const test of event.tests) place(test, "waiting");
            all.hidden = false;
        } else if (event.event === "start") place(event.test, "running");
        else if (event.event === "result") {
            const result = report.results[report.results.length - 1];
            place(event.test, result.outcome === "error" ? "failed" : result.outcome, result);
        }
        if (report.collected.length) {
            const running = report.running ? `, now ${CourseReport.nameOf(report.running)}` : "";
            verdict.textContent = `${report.results.length} of ${report.collected.length} tests ran${running}.`;
        }
    }

    const WORDS = { waiting: "not run", running: "running", passed: "passes", failed: "fails", skipped: "skipped" };

    function place(test, state, result = null) {
        if (!states.has(test)) {
            const made = { square: el("i", {}), row: el("li", {}) };
            states.set(test, made);
            squares.append(made.square);
            list.append(made.row);
        }
        const { square, row } = states.get(test);
        square.className = row.className = `desk-${state}`;
        const more = state === "failed" ? el("details", {}, el("summary", {}, "Why"), told(result))
            : result?.message && state === "skipped" ? el("span", {}, ` (${result.message})`) : null;
        row.replaceChildren(el("b", {}, WORDS[state]), " ", el("code", {}, test.split("::").pop()), more ?? "");
    }

    /** What a failing test says, with ways to its place in the editor. */
    function told(result) {
        const lines = CourseReport.explain(result).map(({ text: words, kind, line }) => el("p", { class: `desk-${kind}` },
            words.trim(), line ? [" ", button(`Go to line ${line}`, () => goTo(line), { class: "desk-go" })] : null));
        const printed = result.printed.trimEnd();
        return el("div", { class: "desk-told" }, lines, printed ? [
            el("p", { class: "desk-aside" }, "Your code printed:"),
            el("pre", {}, el("code", { tabindex: "0" }, printed.split("\n").slice(-40).join("\n"))),
        ] : null);
    }

    // ------------------------------------------------------------ when it has run

    /** Show a report; `seconds` it took, and what else is to be said. */
    function end(report, seconds, notice = "") {
        for (const [test, { row }] of states) {
            if (row.className === "desk-running" || row.className === "desk-waiting") place(test, "waiting");
        }
        const failed = CourseReport.failed(report);
        const good = CourseReport.passed(report).length;
        const took = seconds ? ` (${seconds.toFixed(1)} s)` : "";
        live.setAttribute("aria-live", "polite");
        passed = CourseReport.ok(report);
        first.replaceChildren();
        after.replaceChildren();
        verdict.classList.toggle("desk-good", passed);
        verdict.classList.toggle("desk-bad", !passed);
        if (passed) {
            verdict.textContent = `Passed: all ${good} tests${took}.`;
            congratulate();
        } else if (CourseReport.cannotLoad(report)) {
            verdict.textContent = "The file cannot be loaded.";
            broken(failed[0].message);
        } else if (failed.length) {
            verdict.textContent = `${good} of ${good + failed.length} tests pass${took}.`;
            first.append(el("h3", {}, "The first to mend"), el("p", {}, el("code", {}, CourseReport.label(failed[0]))),
                told(failed[0]), hints(failed[0]));
        } else if (!report.trouble) verdict.textContent = "Nothing could be graded here: every test was skipped.";
        else verdict.textContent = report.results.length ? `${good} tests pass so far${took}.` : "Not graded.";
        for (const words of [report.trouble, notice]) {
            if (words && !(CourseReport.cannotLoad(report) && words === report.trouble)) {
                first.append(...words.split("\n").map((line) => el("p", {}, line)));
            }
        }
        fold();
        box.scrollIntoView({ block: "nearest" });
    }

    function broken(message) {
        const line = CourseReport.brokenLine(message);
        first.append(el("pre", {}, el("code", { tabindex: "0" }, message)));
        if (line) first.append(button(`Go to line ${line}`, () => goTo(line), { class: "desk-go" }));
    }

    /** A button that unfolds one hint after another, those that fit how the test failed. */
    function hints(result) {
        const fit = CourseReport.fitting(data.hints[result.name] ?? [], result.message);
        if (!fit.length) return null;
        const fields = [...new Set(fit.map((hint) => hint.field).filter(Boolean))].sort();
        const key = [result.name, ...fields].join(" ");
        const shown = el("ol", { class: "desk-hints", "aria-live": "polite" });
        const more = button("", () => {
            unfolded.set(key, Math.min(fit.length, (unfolded.get(key) ?? 0) + 1));
            draw();
        });
        const last = el("p", { class: "desk-aside" }, "That was the last hint. The reference is below.");
        function draw() {
            const count = unfolded.get(key) ?? 0;
            shown.replaceChildren(...fit.slice(0, count).map((hint) => el("li", {}, hint.text)));
            more.textContent = `${count ? "Another hint" : "A hint"} (${count + 1} of ${fit.length})`;
            more.hidden = count === fit.length;
            last.hidden = !more.hidden;
        }
        draw();
        return el("div", {}, shown, more, last);
    }

    function congratulate() {
        for (const fold of document.querySelectorAll(".content details.until-passed")) fold.open = true;
        after.append(el("p", {}, "You built: ", data.built.flatMap((name, place) =>
            [place ? ", " : "", el("code", {}, name)]), "."));
        if (data.part) {
            after.append(el("p", {}, "In a checkout this command has the engine call it: ",
                el("code", {}, data.part)));
        }
        const root = typeof path_to_root === "string" ? path_to_root : "";
        after.append(el("p", { class: "desk-bar" },
            button("Compare with the reference", () => {
                reference.open = true;
                reference.scrollIntoView({ block: "start" }); // what opens is below its title
            }),
            data.next ? el("a", { class: "desk-next", href: root + data.next.path },
                `Next: lab ${data.next.id}, ${data.next.title}`) : "That was the last lab."));
    }

    // ------------------------------------------------------------ the reference

    /** Close the fold of the reference and say by its title whether it is earned. */
    function fold() {
        reference.open = false;
        reference.replaceChildren(el("summary", {}, passed ? "Your text beside the reference"
            : "The reference, before you have passed"));
    }
    fold();

    reference.addEventListener("toggle", () => {
        if (!reference.open || reference.childElementCount > 1) return;
        if (passed) show();
        else {
            reference.append(el("p", {}, "You have not passed this lab yet. A hint may be all it takes. ",
                button("Show the reference all the same", show)));
        }
    });

    async function show() {
        const summary = reference.querySelector("summary");
        try {
            const right = await solution();
            const room = el("div", { class: "desk-beside-reference" });
            reference.replaceChildren(summary, room);
            const mine = text();
            if (mine === right) room.append(el("p", {}, "Your text and the reference are the same."));
            else if (room.clientWidth >= 900) await CourseDesk.difference(room, mine, right);
            else room.append(CourseDiff.draw(mine, right, ["yours", "the reference"]));
        } catch (error) {
            reference.replaceChildren(summary, el("p", {}, `It could not be fetched (${error.message}).`));
        }
    }

    /** Say why there is nothing to show. */
    function rest(words) {
        live.setAttribute("aria-live", "polite");
        verdict.textContent = words;
        verdict.classList.add("desk-bad");
    }

    return { box, begin, heard, end, rest };
};
