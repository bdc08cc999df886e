/* How a question is put for an answer: its words, and a field or choices. Nothing global but `CourseAsk`. */
"use strict";

globalThis.CourseAsk = (() => {
    const make = (tag, properties = {}, ...children) => {
        const node = Object.assign(document.createElement(tag), properties);
        node.append(...children);
        return node;
    };

    /** A long name may break after `_`, `.` and `/`. */
    const jointed = (text) => text.split(/(?<=[A-Za-z][_./])(?=[A-Za-z_])/)
        .flatMap((part, place) => (place ? [make("wbr"), part] : [part]));

    /** Words with their `code`. */
    const worded = (text) =>
        text.split(/(`[^`]+`)/).flatMap((part) => {
            const code = part.length > 2 && part.startsWith("`") && part.endsWith("`");
            return code ? [make("code", {}, ...jointed(part.slice(1, -1)))] : jointed(part);
        });

    /** A form that holds an answer, and its buttons: {form, get, set, focus}.
     *
     * One of `choices` where there are some, else a text with the `unit` behind it. `name` is of this form alone;
     * `ask` and `verdict` are the ids of the words that it answers, and of what is said to the answer.
     */
    const form = ({ name, choices, unit = "", ask, verdict }, ...buttons) => {
        const box = make("form", { className: "answer-form", noValidate: true });
        if (choices.length) {
            const rows = choices.map((choice) => {
                const input = make("input", { type: "radio", name, value: choice });
                return make("label", {}, input, make("span", {}, ...worded(choice)));
            });
            const group = make("div", { className: "answer-choices" }, ...rows);
            group.setAttribute("role", "radiogroup");
            group.setAttribute("aria-labelledby", ask);
            box.append(group, ...buttons);
            const inputs = [...group.querySelectorAll("input")];
            const chosen = () => inputs.find((input) => input.checked);
            return {
                form: box,
                get: () => chosen()?.value ?? "",
                set: (text) => {
                    for (const input of inputs) input.checked = input.value === text;
                },
                focus: () => (chosen() ?? inputs[0]).focus(),
            };
        }
        const input = make("input", { type: "text", name, autocomplete: "off", spellcheck: false });
        input.autocapitalize = "off";
        input.setAttribute("aria-labelledby", ask);
        input.setAttribute("aria-describedby", verdict);
        const units = unit ? [make("span", { className: "answer-unit", textContent: unit })] : [];
        box.append(input, ...units, ...buttons);
        return { form: box, get: () => input.value, set: (text) => (input.value = text), focus: () => input.focus() };
    };

    return { make, worded, form };
})();
