/* Whether an answer is right, by its meaning: what `Question.check` of course/learning/quiz.py says, in the
   page. Units of the same kind, letters or texts of choices; neither case nor punctuation counts. */
"use strict";

globalThis.CourseQuiz = (() => {
    // Python's notion of a space, of a digit and of a letter, not JavaScript's.
    const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
    const EDGES = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "gu");
    const NUMBER = new RegExp(
        `^[~\u2248=${SPACE}]*([-+]?(?:\\p{Nd}[\\p{Nd},_]*)?\\.?\\p{Nd}+(?:[eE][-+]?\\p{Nd}+)?)` +
            `(?:[${SPACE}]*/[${SPACE}]*(\\p{Nd}+))?[${SPACE}]*([^\\n]*)$`,
        "u",
    );
    const POWER = new RegExp(
        `(?<=\\p{Nd})[${SPACE}]*[xX\u00d7*\u00b7][${SPACE}]*10[${SPACE}]*(?:\\^|\\*\\*)[${SPACE}]*([-+]?\\p{Nd}+)`, "gu",
    );
    const scale = (first, base) =>
        ["k", "m", "g", "t"].map((prefix, n) => [`${prefix}${first}`, base ** (n + 1)]);
    const SIZES = new Map([["b", 1], ["bytes", 1], ["byte", 1], ...scale("ib", 1024), ...scale("b", 1000)]);
    const TIMES = new Map([
        ["s", 1], ["seconds", 1], ["ms", 1e-3], ["us", 1e-6], ["\u03bcs", 1e-6], ["ns", 1e-9], ["min", 60],
        ["h", 3600],
    ]);
    const PER_CENT = ["%", "percent", "per cent"];
    const WRONG_TOLERANCE = 0.005;

    const strip = (text) => text.replace(EDGES, "");

    /** Python's casefold, sign by sign; the few that fold to themselves there keep their form. */
    const fold = (text) => {
        let folded = "";
        for (const sign of text) {
            const code = sign.codePointAt(0);
            const cherokee = (code >= 0x13a0 && code <= 0x13fd) || (code >= 0xab70 && code <= 0xabbf);
            if (code === 0x131) folded += sign;
            else if (cherokee) folded += sign.toUpperCase();
            else folded += sign.toLowerCase().toUpperCase().replace(/./gsu, (each) => each.toLowerCase());
        }
        return folded;
    };

    /** Without case, punctuation and article; an answer that is nothing else stays. */
    const plain = (text) => {
        let words = fold(text).split(/[^\p{L}\p{N}]+/u).filter(Boolean);
        if (words.length > 1 && ["the", "a", "an"].includes(words[0])) words = words.slice(1);
        return words.join(" ") || strip(text);
    };

    /** With the decimal digits of any script as those of ours. */
    const digits = (text) =>
        text.replace(/\p{Nd}/gu, (digit) => {
            const code = digit.codePointAt(0);
            let first = code;
            while (/\p{Nd}/u.test(String.fromCodePoint(first - 1))) first -= 1;
            return String((code - first) % 10);
        });

    /** A number as it was typed: 1,500 is fifteen hundred, 7,5 is seven and a half. */
    const value = (text) => {
        const plainly = digits(text);
        const decimal = /^([-+]?\d*),(\d+)((?:e[-+]?\d+)?)$/i.exec(plainly);
        if (decimal && (decimal[2].length !== 3 || !/[1-9]/.test(decimal[1]))) {
            return Number(`${decimal[1]}.${decimal[2]}${decimal[3]}`);
        }
        const [whole] = plainly.split(/[.e]/i, 1);
        if (whole.includes(",") && !/^[-+]?\d{1,3}(,\d{3})+$/.test(whole)) return NaN; // 1,5,2
        return Number(plainly.replace(/[,_]/g, ""));
    };

    /** As Python's `.10g` writes it. */
    const shown = (number) => {
        if (number === 0) return "0";
        const [digitsOf, power] = number.toExponential(9).split("e");
        if (Number(power) < -4 || Number(power) >= 10) {
            const sign = power[0];
            return `${digitsOf.replace(/\.?0+$/, "")}e${sign}${power.slice(1).padStart(2, "0")}`;
        }
        return String(Number(number.toPrecision(10)));
    };

    /** A number, a divisor and what follows, of an answer as it was typed; null without a number. */
    const typed = (given) => {
        const joined = strip(given).replace(/(?<=\p{Nd})[ \xa0\u2009\u202f'](?=\p{Nd}{3}(?!\p{Nd}))/gu, "");
        return NUMBER.exec(joined.replace(POWER, "e$1"));
    };

    /** A number without a unit, however it was typed; NaN where it is none. */
    const numberOf = (given) => {
        const match = typed(given);
        const below = match && !strip(match[3]) ? (match[2] ? value(match[2]) : 1) : 0;
        return below ? value(match[1]) / below : NaN;
    };

    /** How a number was read, in our own form; "" for other answers. */
    const readAs = (question, given) => {
        const match = typed(given);
        if (question.number === null || !match) return "";
        const below = match[2] ? ` / ${match[2]}` : "";
        return `${shown(value(match[1]))}${below} ${strip(match[3])}`.trimEnd();
    };

    /** A number in the question's unit; null where it is none, or of another kind. */
    const valueOf = (question, given) => {
        const match = typed(given);
        const below = match ? (match[2] ? value(match[2]) : 1) : 0;
        if (below === 0) return null;
        let found = value(match[1]) / below;
        if (Number.isNaN(found)) return null;
        const own = strip(fold(question.unit));
        const theirs = fold(match[3]).replace(/^[ .]+|[ .]+$/g, "");
        if (PER_CENT.includes(theirs) && own !== "%") found /= 100;
        else if (match[2] && !theirs && own === "%") found *= 100;
        for (const table of [SIZES, TIMES]) {
            if (table.has(theirs) && table.has(own)) found *= table.get(theirs) / table.get(own);
            else if (own && table.has(theirs) && ([...theirs].length > 1 || SIZES.has(own) || TIMES.has(own))) {
                return null; // a size where steps are asked for; "8 b" may still be eight blocks
            }
        }
        return found;
    };

    const isNumber = (question, given) => {
        const found = valueOf(question, given);
        return found !== null && Math.abs(found - question.number) <= question.tolerance * Math.abs(question.number);
    };

    /** Factors by which a number with this unit is often off, and what each says. */
    const slips = (own) => [
        [-1, "The size is right, the sign is not."],
        ...(own === "" || PER_CENT.includes(own)
            ? [100, 0.01].map((factor) => [factor, "A share and a percentage differ by a factor of 100."]) : []),
        ...[1e3, 1e-3, 1e6, 1e-6, 1e9, 1e-9].map((factor) =>
            [factor, "The digits are right. A prefix or a power of ten is not."]),
        ...(SIZES.has(own) ? [
            [8, "Those are bits. A byte has 8."],
            [0.125, "A byte has 8 bits: you divided by them."],
            ...[1.024, 1.048576, 1.073741824].flatMap((factor) => [
                [factor, "A unit of 1024 was taken for one of 1000: GB is 1e9 bytes, GiB 2^30."],
                [1 / factor, "A unit of 1000 was taken for one of 1024: GB is 1e9 bytes, GiB 2^30."],
            ]),
        ] : []),
    ];

    /** What a wrong number says about its unit; "" where it says nothing. */
    const slip = (question, given) => {
        const found = valueOf(question, given);
        if (found === null) {
            const theirs = strip(typed(given)?.[3] ?? "");
            return theirs ? `Wanted are ${question.unit}: ${theirs} measures something else.` : "";
        }
        if (!question.number || !found) return "";
        const near = Math.max(question.tolerance, WRONG_TOLERANCE);
        const off = ([factor]) => Math.abs(found / question.number / factor - 1) <= near;
        return slips(strip(fold(question.unit))).find(off)?.[1] ?? "";
    };

    const isChoice = (question, given) => {
        const said = plain(given);
        const known = new Map(question.choices.map((choice) => [plain(choice), choice]));
        const letters = new Map(question.choices.slice(0, 26).map((choice, n) => [String.fromCharCode(97 + n), choice]));
        return (known.get(said) || letters.get(said)) === question.choice;
    };

    const PLACE = /((?:[\w.-]+\/)*[\w.-]+\.[A-Za-z]+)(?::|#L| +line +| +)(\d+)\S*/;

    /** The path and the line that an answer names, the first line of a range; else null. */
    const place = (given) => {
        const match = PLACE.exec(given.replaceAll("`", "").replaceAll("\\", "/"));
        return match && [match[1], Number(match[2])];
    };

    const cited = (where) => {
        const [, path, first, last] = /^([\w./-]+):(\d+)(?:-(\d+))?/.exec(where);
        return [path, Number(first), Number(last ?? first)];
    };

    const names = (given, path) => `/${given}`.endsWith(`/${path}`) || `/${path}`.endsWith(`/${given}`);

    const isPlace = (question, given) => {
        const said = place(given);
        const [path, first, last] = cited(question.where);
        return said !== null && names(said[0], path) && first <= said[1] && said[1] <= last;
    };

    /** Whether `given`, a text, answers `question`, an object of `quiz.document`. */
    const check = (question, given) => {
        if (question.number !== null) return isNumber(question, given);
        if (question.choices.length) return isChoice(question, given);
        if (question.where) return isPlace(question, given);
        return question.accept.map(plain).includes(plain(given));
    };

    /** What was thought by who answers `given`, as far as the question knows; else "". */
    const misconception = (question, given) => {
        for (const [answer, thought] of question.wrong) {
            const near = Number.isInteger(Number(answer)) ? 0 : WRONG_TOLERANCE;
            const as = question.number !== null
                ? { number: Number(answer), tolerance: Math.max(near, question.tolerance) }
                : question.where ? { where: answer }
                    : question.choices.length ? { choice: answer } : { accept: [answer] };
            if (check({ ...question, ...as }, given)) return thought;
        }
        const said = question.where ? place(given) : null;
        if (said && names(said[0], cited(question.where)[0]) && !check(question, given)) {
            return "The file is right; it is decided in other lines of it.";
        }
        return question.number === null || check(question, given) ? "" : slip(question, given);
    };

    /** Whether `given` is an answer of the kind that is wanted, right or wrong. */
    const readable = (question, given) => {
        if (question.where) return place(given) !== null;
        return question.number === null ? strip(given) !== "" : typed(given) !== null;
    };

    return { check, digits, fold, misconception, numberOf, plain, readable, readAs, strip, typed, value, valueOf };
})();
