/* Boxes in which an exercise is answered: drawn from the quiz's data, checked by quiz.js, kept by CourseStore. */
"use strict";

(() => {
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

    /** What kind of answer a question wants, in a sentence. */
    const wanted = (question) => {
        if (question.number !== null) {
            const unit = question.unit ? ` in ${question.unit}` : "";
            const exact = question.tolerance === 0;
            const near = `, within ${Number((100 * question.tolerance).toPrecision(3))} % of it`;
            return `Wanted: a number${unit}${exact ? ", exactly" : near}.`;
        }
        if (question.choices.length) return "Wanted: one of these, and one only.";
        return "Wanted: a name or a few words; case and punctuation do not count.";
    };

    const answerOf = (question) => {
        if (question.number === null) return question.choice || question.accept[0];
        const unit = question.unit === "%" ? " %" : ` ${question.unit}`;
        return (question.number.toLocaleString("en", { maximumFractionDigits: 20 }) + unit).trim();
    };

    const store = typeof CourseStore === "undefined" ? null : CourseStore;

    const draw = (host) => {
        const question = JSON.parse(host.querySelector("script").textContent);
        const name = `answer-${question.id}`;
        const ask = make("p", { className: "answer-ask", id: `${name}-ask` }, ...worded(question.ask));
        const verdict = make("div", { className: "answer-verdict", id: `${name}-verdict` });
        verdict.setAttribute("aria-live", "polite");
        const form = make("form", { className: "answer-form", noValidate: true });
        const check = make("button", { type: "submit", textContent: "Check" });

        let given;
        if (question.choices.length) {
            const choices = question.choices.map((choice) => {
                const input = make("input", { type: "radio", name, value: choice });
                return make("label", {}, input, make("span", {}, ...worded(choice)));
            });
            const group = make("div", { className: "answer-choices" }, ...choices);
            group.setAttribute("role", "radiogroup");
            group.setAttribute("aria-labelledby", ask.id);
            given = {
                get: () => form.querySelector("input:checked")?.value ?? "",
                set: (text) => {
                    for (const input of form.querySelectorAll("input")) input.checked = input.value === text;
                },
            };
            form.append(group, check);
        } else {
            const input = make("input", { type: "text", name, autocomplete: "off", spellcheck: false });
            input.autocapitalize = "off";
            input.setAttribute("aria-labelledby", ask.id);
            input.setAttribute("aria-describedby", verdict.id);
            given = { get: () => input.value, set: (text) => (input.value = text) };
            const unit = question.unit ? [make("span", { className: "answer-unit", textContent: question.unit })] : [];
            form.append(input, ...unit, check);
        }

        const explain = () => make("p", {}, ...worded(question.explain));
        const show = (kind, ...lines) => {
            host.dataset.state = kind;
            verdict.replaceChildren(...lines);
        };
        const right = () => show("right", make("p", {}, make("strong", { textContent: "Right." })), explain());
        const wrong = () => {
            const reveal = make("button", { type: "button", textContent: "Show the answer" });
            reveal.addEventListener("click", () => {
                const answer = make("strong", {}, ...worded(answerOf(question)));
                show("shown", make("p", {}, "The answer: ", answer), explain());
            });
            const readable = CourseQuiz.readable(question, given.get());
            const head = make("strong", { textContent: readable ? "Not this." : "That cannot be read." });
            show("wrong", make("p", {}, head, ` ${wanted(question)} Try again, or `, reveal));
        };

        form.addEventListener("submit", (event) => {
            event.preventDefault();
            const text = given.get();
            if (!text.trim()) {
                show("empty", make("p", { textContent: wanted(question) }));
                return;
            }
            const correct = CourseQuiz.check(question, text);
            store?.saveAnswer(question.id, { given: text, right: correct, at: new Date().toISOString() });
            if (correct) right();
            else wrong();
        });

        host.append(ask, form, verdict);
        host.hidden = false;
        const kept = store?.answer(question.id);
        if (!kept) return;
        given.set(kept.given);
        if (kept.right) right();
        else wrong();
    };

    for (const host of document.querySelectorAll(".answer-box")) draw(host);
})();
