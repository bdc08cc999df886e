/* Predict first: a lab's questions before its editor, and what was measured beside the answers after a run. */
"use strict";

/** The predictions of a desk: {box, told, begin, ended, standing}.
 *
 * `data` is the lab's document; `file` what the course on this machine says of the lab, null where this browser keeps
 * the answers. `box` asks, `told` compares after a run. An answer is compared only where it was committed before its
 * measured value was shown, and the first comparison counts: as `course predict` and `course check` do it.
 */
CourseDesk.predict = ({ data, file }) => {
    const { el, button } = CourseDesk;
    const { read, judge, meaning, shown, told: wordsOf, wanted } = CoursePrediction;
    const lab = data.id;
    const asked = Object.entries(data.predictions);
    let disk = null; // what stands in predictions.yaml
    let ran = null; // of the last run: what it measured, and what was committed then, by name

    const problems = el("div", {});
    const count = el("span", { class: "desk-aside" });
    const cards = asked.map(([name, question]) => card(name, question));
    const box = el("details", { class: "desk-predict" }, el("summary", {}, "Predict first ", count),
        el("p", {}, "Commit what you expect. After a run it stands beside what was measured; nothing fails by it."),
        problems, cards.map((each) => each.host));
    const told = el("div", { class: "desk-predicted" });

    /** What is committed, by name: {given, at, measured, first}. */
    const entries = () => disk ?? CourseStore.predictions(lab);

    /** Take over what stands in the file on this machine. */
    function standing({ predictions, problems: wrong }) {
        disk = new Map(Object.entries(predictions));
        problems.replaceChildren(...wrong.map((each) => el("p", { class: "desk-bad" }, each)));
        draw();
    }

    // ------------------------------------------------------------ one question

    function card(name, question) {
        const id = `predict-${name}`;
        const ask = el("p", { id: `${id}-ask`, class: "answer-ask" }, CourseAsk.worded(question.ask));
        const verdict = el("div", { id: `${id}-verdict`, class: "answer-verdict", "aria-live": "polite" });
        const commit = el("button", { type: "submit" }, "Commit");
        const leave = button("Leave it", () => (draw(true), change.focus()), { hidden: true });
        const { choices } = question;
        const given = CourseAsk.form({ name: id, choices, ask: ask.id, verdict: verdict.id }, commit, leave);
        const change = button("Change", open, { "aria-describedby": ask.id });
        const host = el("div", { class: "answer-box" }, ask, given.form, verdict);
        let drawn = null; // the entry that is shown

        const say = (...lines) => verdict.replaceChildren(...lines.map((line) => el("p", {}, line)));

        /** What is committed; null also where it is no answer to the question as it is now. */
        function entry() {
            const found = entries().get(name);
            try {
                return found ? { ...found, given: read(question, found.given) } : null;
            } catch {
                return null;
            }
        }

        /** Show what is committed, unless it is shown already. */
        function draw(anew = false) {
            const found = entry();
            const mark = JSON.stringify(found);
            if (mark === drawn && !anew) return prefill(found);
            drawn = mark;
            leave.hidden = true;
            given.form.hidden = found !== null;
            delete host.dataset.state;
            if (found) compare(found);
            else {
                const gone = entries().get(name);
                if (gone) say(`You said ${shown(gone.given)}, and the question has changed. ${wanted(question)}`);
                else say();
                prefill(found);
            }
        }

        /** What this browser holds is offered where the file on this machine has none. */
        function prefill(found) {
            const here = found || !disk ? null : CourseStore.predictions(lab).get(name);
            if (here && !given.get()) given.set(String(here.first ?? here.given));
        }

        function compare({ given: answer, measured, first = answer }) {
            const bar = (words) => el("span", { class: "desk-bar" }, el("span", {}, words), change);
            if (measured === undefined) return say(bar(`You said ${shown(answer)}.`));
            const outcome = judge(question, first, measured);
            const words = wordsOf(question, first, measured);
            host.dataset.state = outcome;
            say(bar(first === answer ? words.replace("you", "You")
                : `You said ${shown(answer)}. The first answer counts: ${words}`),
            ...[meaning(question, outcome)].filter(Boolean));
        }

        function open() {
            const { given: answer, measured } = entry();
            given.set(String(answer));
            given.form.hidden = leave.hidden = false;
            say(...(measured === undefined ? [] : ["It was compared already: the first answer counts."]));
            given.focus();
        }

        given.form.addEventListener("submit", async (event) => {
            event.preventDefault();
            const text = given.get();
            let answer;
            try {
                answer = read(question, text);
            } catch {
                return say(text.trim() ? `That cannot be read. ${wanted(question)}` : wanted(question));
            }
            commit.disabled = true;
            try {
                await keep(name, answer, entry()?.given ?? null);
                draw(true);
                if (!disk && CourseStore.notice()) verdict.append(el("p", {}, CourseStore.notice()));
                change.focus();
            } catch (error) {
                const words = `Not committed: ${error.message}.`;
                if (given.form.hidden) verdict.append(el("p", { class: "desk-bad" }, words));
                else say(words);
            }
            commit.disabled = false;
        });

        return { name, question, host, entry, draw, open: () => (entry() ? change : given).focus() };
    }

    async function keep(name, given, before) {
        if (!disk) return void CourseStore.savePrediction(lab, name, given);
        const answer = await CourseStore.local("predict", { lab, name, given, before });
        const said = await answer.json();
        if (said.predictions) standing(said);
        if (!answer.ok) throw new Error(said.error);
    }

    // ------------------------------------------------------------ all of them

    function draw() {
        for (const each of cards) each.draw();
        const known = cards.map((each) => [each.question, each.entry()]).filter(([, entry]) => entry);
        const compared = known.filter(([, entry]) => entry.measured !== undefined);
        const right = compared.filter(([question, { given, first = given, measured }]) =>
            judge(question, first, measured) === "right");
        count.textContent = `${known.length} of ${cards.length} committed`
            + (compared.length ? `, ${right.length} of ${compared.length} right` : "");
        if (ran) tell();
        return known.length;
    }

    function begin() {
        ran = null;
        told.replaceChildren();
    }

    /** A run has ended that measured this, by name. */
    function ended(measured) {
        const known = cards.filter((each) => each.entry());
        const committed = new Map(known.map((each) => [each.name, each.entry().given]));
        if (!disk) {
            for (const name of committed.keys()) {
                if (measured[name] !== undefined) CourseStore.saveMeasured(lab, name, measured[name]);
            }
        }
        ran = { measured, committed };
        draw();
    }

    /** What was measured beside what was said, in the words of `course check`. */
    function tell() {
        const lines = cards.filter((each) => each.entry()).map(({ name, question, entry }) => {
            const { given } = entry();
            const capital = (words) => words[0].toUpperCase() + words.slice(1);
            const head = [el("q", {}, CourseAsk.worded(question.ask)), " "];
            if (ran.committed.get(name) !== given) return el("p", {}, head, `You said ${shown(given)}; run the tests to compare.`);
            const measured = ran.measured[name];
            const outcome = measured === undefined ? "" : judge(question, given, measured);
            const means = outcome && meaning(question, outcome);
            return [el("p", { class: outcome === "right" ? "desk-good" : null }, head, capital(wordsOf(question, given, measured))),
                means ? el("p", { class: "desk-means" }, means) : null];
        });
        const missing = cards.filter((each) => !each.entry());
        const none = missing.length === 1 ? "One question has no committed answer"
            : `${missing.length} questions have no committed answer`;
        told.replaceChildren(...[el("h3", {}, "Predictions"), lines, missing.length ? el("p", { class: "desk-bar" },
            el("span", {}, `${none}, so what was measured is not shown.`),
            button("Commit one", () => {
                box.open = true;
                missing[0].host.scrollIntoView({ block: "center" });
                missing[0].open();
            })) : []].flat(Infinity).filter(Boolean));
    }

    if (file) standing(file);
    box.open = draw() < cards.length;
    CourseStore.onchange(({ section }) => (section === null || section === "predictions") && draw());
    return { box, told, begin, ended, standing };
};
