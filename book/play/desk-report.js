/* What a reader is told of a grading: the same words as `course check`, and the hints of `course hint`.
 *
 * Pure functions over the events of course/learning/runner.py; course/learning/grading.py and show.py are what they
 * repeat, and a test holds them against each other. Nothing global but `CourseReport`.
 */
"use strict";

const CourseReport = (() => {
    const LONGEST_COMPARISON = 160;
    const LONGEST = 300;
    const base = (file) => file.split(/[\\/]/).pop();

    /** A report of no run yet; `heard` fills it. */
    const begun = () => ({ collected: [], results: [], running: "", reading: false, trouble: "" });

    /** Put one event of the runner into a report. */
    function heard(report, event) {
        if (event.event === "collected") report.collected = event.tests;
        else if (event.event === "start") report.running = event.test;
        else if (event.event === "reading") report.reading = event.on;
        else if (event.event === "collect-error") report.trouble = `The test file could not be read:\n${event.message}`;
        else if (event.event === "result") {
            report.running = "";
            const outcome = event.outcome === "failed" && event.when === "setup" ? "error" : event.outcome;
            report.results.push({ error: "", message: "", frames: [], printed: "", ...event, outcome });
        }
    }

    /** What pytest's exit status says beside the results; `output` is what it printed. */
    function ended(report, { status, output = "" }) {
        const tail = output.trim().split("\n").slice(-12).join("\n");
        const named = new Set(report.results.map((result) => result.test));
        const left = report.collected.filter((test) => !named.has(test)).map(nameOf);
        if (report.trouble) return;
        if (status === 3 || status === 4 || (status === 2 && !report.collected.length)) {
            report.trouble = `The tests could not be started:\n${tail}`;
        } else if (!report.collected.length) report.trouble = "There are no tests here.";
        else if (left.length) {
            report.trouble = `Without a result, since the tests ended early: ${[...new Set(left)].join(", ")}.`;
        }
    }

    const nameOf = (test) => test.split("::").pop().replace(/\[.*/s, "");
    const label = (result) => result.test.split("::").pop();
    const failed = (report) => report.results.filter((each) => each.outcome === "failed" || each.outcome === "error");
    const passed = (report) => report.results.filter((each) => each.outcome === "passed");
    const ok = (report) => passed(report).length > 0 && !failed(report).length && !report.trouble;

    /** What the tests that passed have measured, by the name of the prediction it answers. */
    const measured = (report) => Object.assign({}, ...passed(report).map((each) => each.measured ?? {}));

    /** Whether the reader's file itself is broken, so that every test says the same. */
    const cannotLoad = (report) => failed(report).length > 0 && !passed(report).length
        && failed(report).every((each) => each.outcome === "error" && each.message === failed(report)[0].message);

    /** The line of starter.py that a file which cannot be loaded is broken at. */
    const brokenLine = (message) => Number(/^starter\.py, line (\d+) cannot/.exec(message)?.[1] ?? 0);

    /** One failing test as lines: {text, kind, line}; kind is "say", "aside" or "code", line one of starter.py. */
    function explain(result) {
        const own = result.frames.filter((frame) => base(frame.file) === "starter.py");
        const test = result.frames.filter((frame) => base(frame.file) === "test_lab.py");
        const where = (frame) => `${base(frame.file)}, line ${frame.line}`;
        const last = (frames) => frames[frames.length - 1];
        const lines = [];
        const say = (text, kind = "say", line = 0) => lines.push({ text, kind, line });
        const paragraphs = (text) => text.split(/\r\n|\r|\n/).forEach((part, place, all) =>
            (part || place < all.length - 1) && say(part));
        const gone = /^module '_lab_\w+' has no attribute '(\w+)'/.exec(result.message);
        if (result.error === "NotImplementedError" && own.length) {
            say(`${last(own).name} is not written yet (${where(last(own))}).`, "say", last(own).line);
            paragraphs(result.message);
        } else if (result.error === "AssertionError" || result.error === "Failed") {
            const [message, compared] = splitComparison(result.message);
            paragraphs(message);
            if (compared) say(`compared: ${compared}`, "aside");
            if (result.error === "AssertionError" && own.length) {
                say(`The assertion is in ${where(last(own))}: ${last(own).code}`, "say", last(own).line);
            }
        } else if (own.length) {
            say(`${last(own).name} raised ${result.error}: ${short(result.message)}`);
            say(`    ${where(last(own))}:  ${last(own).code}`, "code", last(own).line);
            if (test.length) say(`    called by ${where(test[0])}:  ${test[0].code}`, "aside");
        } else if (gone) {
            say(`starter.py defines no ${gone[1]}: its names and arguments belong to the lab.`);
        } else {
            say(`The test could not use what your code gave it: ${short(result.message)}`);
            if (test.length) {
                say(`    ${where(last(test))}:  ${last(test).code}`, "code");
                say(`That is ${result.error}, raised by the test. Compare what your function `
                    + "returns with the Returns section of its docstring.");
            }
        }
        return lines;
    }

    /** The author's words, and the comparison that pytest has put behind them. */
    function splitComparison(message) {
        const at = message.lastIndexOf("\nassert ");
        if (at < 0) {
            if (!message.startsWith("assert ")) return [message, ""];
            return ["The test gives no words of its own.", message.slice("assert ".length)];
        }
        const first = message.slice(at + "\nassert ".length).split("\n")[0];
        const words = message.slice(0, at);
        if (first.startsWith("(")) return [words, ""];
        return [words, cut(first, LONGEST_COMPARISON)];
    }

    // Characters, as Python counts them.
    const cut = (text, limit) => {
        const letters = Array.from(text);
        return letters.length > limit ? `${letters.slice(0, limit).join("")} ...` : text;
    };
    const short = (text) => cut(text.split(/\s+/).filter(Boolean).join(" "), LONGEST);

    /** The hints for a failure, as `fitting` of course/learning/manifest.py: the general ones, and its field's. */
    function fitting(hints, failure) {
        const told = /\bseed \d+[^\n]*, step \d+, (\w+)/.exec(failure);
        const named = new Set(told ? [told[1]] : failure.match(/\w+/g) ?? []);
        return hints.filter((hint) => !hint.field || named.has(hint.field));
    }

    return {
        begun, heard, ended, nameOf, label, failed, passed, ok, measured, cannotLoad, brokenLine, explain, fitting,
    };
})();

if (typeof module !== "undefined") module.exports = CourseReport;
