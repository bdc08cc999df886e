/* Predictions: how an answer is read, judged and told, as course/learning/predictions.py and show.py do it.
 *
 * Pure functions over a prediction of lab.yaml, {ask, choices, tolerance, means}; a test holds them against Python's.
 * Needs book/places/quiz.js. Nothing global but `CoursePrediction`.
 */
"use strict";

const CoursePrediction = (() => {
    // What float() strips within a text: of ASCII less than str.strip() does.
    const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
    const EDGES = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g");
    const NUMBER = /^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$/;

    /** What kind of answer is wanted, in a sentence; the words of the exercises' boxes. */
    const wanted = (asked) => (asked.choices.length ? "Wanted: one of these, and one only." : "Wanted: a number.");

    /** An answer as it was given: a number, or the text or the letter of a choice. Throws an Error when it is neither. */
    function read(asked, given) {
        const text = CourseQuiz.strip(String(given));
        if (asked.choices.length) {
            const said = CourseQuiz.fold(text);
            const known = new Map(asked.choices.map((choice) => [CourseQuiz.fold(choice), choice]));
            const letters = new Map(asked.choices.map((choice, place) => [String.fromCharCode(97 + place), choice]));
            const found = known.get(said) || letters.get(said.replace(/[).:]+$/, ""));
            if (found === undefined) throw new Error(wanted(asked));
            return found;
        }
        const number = CourseQuiz.digits(text.replaceAll("_", "")).replace(EDGES, "");
        const said = CourseQuiz.numberOf(text);
        const value = Number.isNaN(said) && NUMBER.test(number) ? Number(number) : said;
        if (typeof given === "boolean" || !Number.isFinite(value)) throw new Error(wanted(asked));
        return value === 0 ? 0 : value; // never -0
    }

    /** "right", or on which side of the measured value the answer lies. */
    function judge(asked, given, measured) {
        if (typeof given === "string" || typeof measured === "string") return given === measured ? "right" : "other";
        if (Math.abs(given - measured) <= asked.tolerance * Math.abs(measured)) return "right";
        return given < measured ? "low" : "high";
    }

    /** What the outcome tells, in the lab's words; "" where it has none. */
    const meaning = (asked, outcome) => asked.means[outcome] || (outcome === "right" ? "" : asked.means.other ?? "");

    /** A value as Python prints it. */
    function shown(value) {
        const size = Math.abs(value);
        if (typeof value !== "number" || size === 0 || (size >= 1e-4 && size < 1e16)) return String(value);
        return value.toExponential().replace(/e([-+])(\d)$/, "e$10$2");
    }

    /** The words of `course check` on one answer, after its name; `measured` is undefined before its test has passed. */
    function told(asked, given, measured) {
        if (measured === undefined) return `you said ${shown(given)}; its test has not passed yet.`;
        return `you said ${shown(given)}, measured ${shown(measured)}: ${judge(asked, given, measured)}.`;
    }

    return { wanted, read, judge, meaning, shown, told };
})();

if (typeof module !== "undefined") module.exports = CoursePrediction;
