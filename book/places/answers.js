/* Boxes in which an exercise is answered: drawn from the quiz's data, checked by quiz.js, kept by CourseStore. */
"use strict";

(() => {
    const { make, worded, form: formOf } = CourseAsk;

    /** What kind of answer a question wants, in a sentence. */
    const wanted = (question) => {
        if (question.number !== null) {
            const unit = question.unit ? ` in ${question.unit}` : "";
            const exact = question.tolerance === 0;
            const near = `, within ${Number((100 * question.tolerance).toPrecision(3))} % of it`;
            return `Wanted: a number${unit}${exact ? ", exactly" : near}.`;
        }
        if (question.choices.length) return "Wanted: one of these, and one only.";
        if (question.where) return "Wanted: a path and a line of the pinned tree, as in vllm/v1/core/sched/scheduler.py:329.";
        return "Wanted: a name or a few words; case and punctuation do not count.";
    };

    const answerOf = (question) => {
        if (question.number === null) return question.where || question.choice || question.accept[0];
        const unit = question.unit === "%" ? " %" : ` ${question.unit}`;
        const digits = Number.isInteger(question.number) ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 6 };
        return (question.number.toLocaleString("en", digits) + unit).trim();
    };

    const store = typeof CourseStore === "undefined" ? null : CourseStore;

    const draw = (host) => {
        const question = JSON.parse(host.querySelector("script").textContent);
        const name = `answer-${question.id}`;
        const ask = make("p", { className: "answer-ask", id: `${name}-ask` }, ...worded(question.ask));
        const verdict = make("div", { className: "answer-verdict", id: `${name}-verdict` });
        verdict.setAttribute("aria-live", "polite");
        const check = make("button", { type: "submit", textContent: "Check" });
        const { choices, unit } = question;
        const given = formOf({ name, choices, unit, ask: ask.id, verdict: verdict.id }, check);
        const { form } = given;
        if (question.where) form.classList.add("answer-place"); // a path needs room

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
            const read = CourseQuiz.readAs(question, given.get());
            const was = read && read !== given.get().trim() ? ` It was read as ${read}.` : "";
            const thought = CourseQuiz.misconception(question, given.get());
            show("wrong", make("p", {}, head, `${was} ${wanted(question)} Try again, or `, reveal),
                ...(thought ? [make("p", { className: "answer-thought" }, ...worded(thought))] : []));
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
        host.id = name;
        host.hidden = false;
        const kept = store?.answer(question.id);
        if (!kept) return;
        if (store.dueAgain(question.id)) {
            const days = Math.round((Date.now() - Date.parse(kept.at)) / 86_400_000);
            show("again", make("p", { textContent: `Again: you answered this ${days < 2 ? "a day" : `${days} days`} ago, ${
                kept.right ? "rightly" : "and not rightly"}.` }));
            return;
        }
        given.set(kept.given);
        if (kept.right) right();
        else wrong();
    };

    for (const host of document.querySelectorAll(".answer-box:not([data-code])")) draw(host);
})();
