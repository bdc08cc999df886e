/* The search without its face: words as course/site/search.py cuts them, parts of the index loaded when a query
   needs them, sections in order. `CourseSearch.find(query)` gives the best first. */
"use strict";

globalThis.CourseSearch = (() => {
    const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
    const DIGIT = new Map([...ALPHABET].map((sign, value) => [sign, value]));
    const WORD = /[\p{L}\p{N}]+(?:[_.-][\p{L}\p{N}]+)*/gu;
    const ENDINGS = [["ization", 2, "iz"], ["ation", 3, "at"], ["ion", 4, ""], ["ing", 3, ""], ["ed", 3, ""], ["er", 4, ""], ["or", 4, ""]];
    const SHOWN = 20; // results
    const PER_PAGE = 3;
    const LONGEST = 12; // words of a query that are looked at

    // ------------------------------------------------------------ words

    const stem = (word) => {
        if (word.length < 4 || !/^[a-zA-Z]+$/.test(word)) return word;
        if (word.endsWith("ies")) word = `${word.slice(0, -3)}y`;
        else if (word.endsWith("sses")) word = word.slice(0, -2);
        else if (word.endsWith("s") && !"sui".includes(word.at(-2))) word = word.slice(0, -1);
        for (const [ending, least, kept] of ENDINGS) {
            if (word.endsWith(ending) && word.length - ending.length >= least) {
                word = word.slice(0, -ending.length) + kept;
                break;
            }
        }
        const last = word.at(-1);
        if (word.length > 3 && last === word.at(-2) && !"aeiouls".includes(last)) word = word.slice(0, -1);
        return word.length > 3 && word.endsWith("e") ? word.slice(0, -1) : word;
    };

    const partsOf = (whole) =>
        whole.split(/[_.-]/).flatMap((piece) => piece.split(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])/));

    /** [[word, weight], ...], as `words` of search.py yields them. */
    const words = (text) => {
        const found = [];
        for (const [whole] of text.matchAll(WORD)) {
            const parts = partsOf(whole);
            if (parts.length === 1) {
                found.push([stem(whole.toLowerCase()), 1]);
                continue;
            }
            const joined = whole.replace(/[_.-]/g, "").toLowerCase();
            if (joined.length <= 40) found.push([joined, 1]);
            for (const part of parts) found.push([stem(part.toLowerCase()), 0.5]);
        }
        return found;
    };

    // ------------------------------------------------------------ parts of the index

    const asked = new Map(); // "kind-name" to a promise of the part
    const taken = new Map();
    const engine = { load: null }; // load(name): runs the script of that name

    /** What each part of the index calls with its data. */
    const take = (kind, place, data) => taken.set(`${kind}${place}`, data);

    const part = (kind, place, name) => {
        const key = `${kind}${place}`;
        if (!asked.has(key)) {
            const loading = engine.load(`${kind}-${name}.js`).then(() => taken.get(key));
            asked.set(key, loading);
            loading.catch(() => asked.delete(key)); // the next query tries again
        }
        return asked.get(key);
    };

    let index = null;
    const open = async (name) => {
        if (index) return index;
        const { pages, shards } = await part("index", 0, name);
        const first = [];
        const pageOf = [];
        pages.forEach(([, , , titles], n) => {
            first.push(pageOf.length);
            for (let i = 0; i < titles.length; i += 1) pageOf.push(n);
        });
        const crumbs = pages.map(([path, crumb, , titles]) =>
            new Set(words(`${crumb} ${titles[0]} ${path.split("/")[0].replaceAll("-", " ")}`).map(([word]) => word)));
        index = { pages, shards, first, pageOf, crumbs };
        return index;
    };

    const shardParts = new Map(); // place to Map(word, postings as text)
    const shard = async (place) => {
        if (!shardParts.has(place)) {
            const text = await part("shard", place, index.shards[place][1]);
            shardParts.set(place, new Map(text.split("\n").map((line) => line.split(" "))));
        }
        return shardParts.get(place);
    };

    /** Words of the index that begin with `prefix`, with their postings; itself first. */
    const expanded = async (prefix) => {
        const { shards } = index;
        let place = shards.findLastIndex(([from]) => from <= prefix);
        if (place < 0) place = 0;
        const found = [];
        for (; place < shards.length && found.length < 60; place += 1) {
            const [from] = shards[place];
            if (from > prefix && !from.startsWith(prefix)) break;
            for (const [word, postings] of await shard(place)) {
                if (word.startsWith(prefix)) found.push([word, postings]);
            }
        }
        return found;
    };

    const decoded = (text) => {
        const found = [];
        let section = -1;
        for (let i = 0; i < text.length; i += 1) {
            let step = 0;
            let scale = 1;
            let digit = DIGIT.get(text[i]);
            while (digit >= 32) {
                step += (digit - 32) * scale;
                scale *= 32;
                digit = DIGIT.get(text[(i += 1)]);
            }
            section += step + digit * scale;
            found.push([section, DIGIT.get(text[(i += 1)])]);
        }
        return found;
    };

    // ------------------------------------------------------------ ranking

    /** How likely a page of this kind is the place where a thing is explained. */
    const PRIORS = [
        [/^GLOSSARY\.html$/, 1.2],
        [/^(SETUP|CAREER)\.html$/, 1.1],
        [/\/00-guide\.html$/, 1.3],
        [/\/01-deep-dive\.html$/, 1],
        [/\/labs\/lab-[^/]+\/index\.html$/, 1.1],
        [/^phase-[^/]+\/index\.html$/, 0.8],
        [/\/(EXERCISES|INTERVIEW|CHEATSHEET|02-mini-build)\.html$/, 0.8],
        [/^CHANGES\.html$/, 0.5],
        [/^phase-/, 0.7],
        [/^index\.html$/, 0.8],
        [/./, 0.65],
    ];
    const prior = (path) => PRIORS.find(([kind]) => kind.test(path))[1];

    /** The words of a query: each is a list of [word, weight] that may stand for it. */
    const queryWords = (query) =>
        [...query.matchAll(WORD)].slice(0, LONGEST).map(([whole]) => {
            const joined = whole.replace(/[_.-]/g, "").toLowerCase();
            const parts = partsOf(whole).map((each) => each.toLowerCase());
            if (parts.length === 1) return [[stem(joined), joined, 1]];
            return [[joined, joined, 1], ...parts.map((each) => [stem(each), each, 0.3 / parts.length])];
        });

    /** Section to score for one word of the query, and how rare the word is. */
    const scored = async (options, total) => {
        const scores = new Map();
        let rarity = 0;
        for (const [word, typed, weight] of options) {
            const found = await expanded(word.length > 2 && typed.startsWith(word) ? word : typed);
            for (const [each, text] of found) {
                const exact = each === word || each === typed;
                const near = exact ? 1 : each.startsWith(typed) ? 0.6 * (typed.length / each.length) ** 0.5 : 0;
                if (!near) continue;
                const postings = decoded(text);
                const rare = Math.log(1 + total / postings.length);
                if (exact || rarity === 0) rarity = Math.max(rarity, rare * weight);
                for (const [section, impact] of postings) {
                    const score = weight * near * rare * (impact / 63);
                    if (score > (scores.get(section) ?? 0)) scores.set(section, score);
                }
            }
        }
        return { scores, rarity };
    };

    /** The sections that answer a query, best first: [{page, path, crumb, title, anchor, score}]. */
    const find = async (query, name) => {
        const { pages, pageOf, first, crumbs } = await open(name);
        const asks = queryWords(query);
        if (!asks.length) return [];
        const columns = await Promise.all(asks.map((options) => scored(options, pageOf.length)));
        const all = columns.reduce((sum, { rarity }) => sum + rarity, 0) || 1;
        const totals = new Map();
        for (const { scores, rarity } of columns) {
            for (const [section, score] of scores) {
                const entry = totals.get(section) ?? [0, 0];
                totals.set(section, [entry[0] + score, entry[1] + rarity]);
            }
        }
        const stems = new Set(asks.map(([[word]]) => word));
        const ranked = [...totals].map(([section, [score, met]]) => {
            const page = pageOf[section];
            const named = [...stems].filter((word) => crumbs[page].has(word)).length / stems.size;
            return { section, page, score: score * (met / all) ** 2 * prior(pages[page][0]) * (1 + 0.3 * named) };
        });
        ranked.sort((a, b) => b.score - a.score);
        const results = ranked.slice(0, 120).map(({ section, page, score }) => {
            const [path, crumb, , titles, anchors] = pages[page];
            const place = section - first[page];
            const own = words(titles[place]).map(([word]) => word);
            const met = own.filter((word) => stems.has(word)).length;
            const share = own.length ? met / own.length : 0;
            const whole = [...stems].filter((word) => own.includes(word)).length / stems.size;
            const top = place === 0 ? 0.15 * whole : 0;
            return { page, place, path, crumb, title: titles[place], anchor: anchors[place],
                score: score * (1 + share * whole + top) };
        });
        results.sort((a, b) => b.score - a.score);
        const perPage = new Map();
        return results.filter(({ page }) => {
            perPage.set(page, (perPage.get(page) ?? 0) + 1);
            return perPage.get(page) <= PER_PAGE;
        }).slice(0, SHOWN);
    };

    /** The text of a result's section. */
    const textOf = async ({ page, place }) => (await part("text", page, index.pages[page][2]))[place];

    return Object.assign(engine, { take, find, open, textOf, words, stem });
})();
