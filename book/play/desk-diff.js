/* Two texts compared line by line. Nothing global but `CourseDiff`. */
"use strict";

const CourseDiff = (() => {
    const CONTEXT = 3;

    /** [[" ", line] | ["-", line] | ["+", line], ...]: what `before` has, what `after` has, what both have. */
    function lines(before, after) {
        const a = before.replace(/\n$/, "").split("\n");
        const b = after.replace(/\n$/, "").split("\n");
        let start = 0;
        while (start < a.length && start < b.length && a[start] === b[start]) start++;
        let end = 0;
        while (end < a.length - start && end < b.length - start
            && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
        const middle = between(a.slice(start, a.length - end), b.slice(start, b.length - end));
        const same = (line) => [" ", line];
        return [...a.slice(0, start).map(same), ...middle, ...a.slice(a.length - end).map(same)];
    }

    /** The same for what is left between equal ends, by the longest common subsequence. */
    function between(a, b) {
        if (a.length * b.length > 4_000_000) return [...a.map((line) => ["-", line]), ...b.map((line) => ["+", line])];
        const width = b.length + 1;
        const longest = new Uint16Array((a.length + 1) * width);
        for (let i = a.length - 1; i >= 0; i--) {
            for (let j = b.length - 1; j >= 0; j--) {
                const at = i * width + j;
                longest[at] = a[i] === b[j] ? longest[at + width + 1] + 1 : Math.max(longest[at + width], longest[at + 1]);
            }
        }
        const out = [];
        for (let i = 0, j = 0; i < a.length || j < b.length;) {
            if (i < a.length && j < b.length && a[i] === b[j]) out.push([" ", a[i]]), i++, j++;
            else if (i < a.length && (j === b.length || longest[(i + 1) * width + j] >= longest[i * width + j + 1])) {
                out.push(["-", a[i++]]);
            } else out.push(["+", b[j++]]);
        }
        return out;
    }

    /** A box with both; long stretches that are equal are left out. `names` say what - and + stand for. */
    function draw(before, after, names) {
        const { el } = CourseDesk;
        const rows = lines(before, after);
        const near = rows.map((_, place) => rows.slice(Math.max(0, place - CONTEXT), place + CONTEXT + 1)
            .some(([kind]) => kind !== " "));
        const code = el("code", { class: "desk-diff-code", tabindex: "0" });
        rows.forEach(([kind, text], place) => {
            if (near[place]) {
                const kinds = { " ": "desk-same", "-": "desk-minus", "+": "desk-plus" };
                code.append(el("span", { class: kinds[kind] }, `${kind} ${text}\n`));
            } else if (place === 0 || near[place - 1]) code.append(el("span", { class: "desk-cut" }, "...\n"));
        });
        return el("div", { class: "desk-diff" },
            el("p", { class: "desk-key" }, el("span", { class: "desk-minus" }, `- ${names[0]}`), " ",
                el("span", { class: "desk-plus" }, `+ ${names[1]}`)),
            el("pre", {}, code));
    }

    return { lines, draw };
})();

if (typeof module !== "undefined") module.exports = CourseDiff;
