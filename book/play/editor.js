// What the pages use of CodeMirror, in one module: an editor for Python, and two texts compared.
//
// Bundled by `course book runtime` (course/site/play.py); imported at the first edit.

import { indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { HighlightStyle, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { MergeView } from "@codemirror/merge";
import { EditorState } from "@codemirror/state";
import { EditorView, keymap } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { basicSetup } from "codemirror";

const LIGHT = ["#7a1fa2", "#0b6125", "#8a3b00", "#5b6470", "#0b4fa8", "#1c1f24"];
const NAVY = ["#d7a6f5", "#9fd8a4", "#f0b27a", "#9aa7bd", "#8fbcff", "#d6dbe5"];

function colours(dark) {
    const [word, text, number, remark, name, plain] = dark ? NAVY : LIGHT;
    const style = HighlightStyle.define([
        { tag: [tags.keyword, tags.operatorKeyword, tags.modifier, tags.self], color: word },
        { tag: [tags.string, tags.special(tags.string)], color: text },
        { tag: [tags.number, tags.bool, tags.null], color: number },
        { tag: tags.comment, color: remark, fontStyle: "italic" },
        {
            tag: [tags.function(tags.definition(tags.variableName)), tags.definition(tags.className)],
            color: name,
        },
        { tag: tags.meta, color: number },
    ]);
    const theme = EditorView.theme(
        {
            "&": { color: plain, backgroundColor: "transparent" },
            ".cm-content": { caretColor: plain },
            ".cm-cursor": { borderLeftColor: plain },
            ".cm-gutters": { backgroundColor: "transparent", color: remark, border: "none" },
            ".cm-activeLine, .cm-activeLineGutter": {
                backgroundColor: dark ? "#ffffff0d" : "#0000000a",
            },
            "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground":
                { backgroundColor: dark ? "#3d5a8a" : "#c9dcf8" },
        },
        { dark },
    );
    return [syntaxHighlighting(style), theme];
}

function common(dark) {
    return [
        basicSetup,
        keymap.of([indentWithTab]),
        python(),
        indentUnit.of("    "),
        EditorState.tabSize.of(4),
        colours(dark),
    ];
}

// An editor in `parent`. Escape, then Tab, leaves it by the keyboard.
//
// label: its name for a screen reader. onChange(text) hears of every change by the reader.
export function createEditor(parent, { doc = "", onChange, label = "", readOnly = false, dark = false } = {}) {
    let quiet = false;
    const view = new EditorView({
        parent,
        doc,
        extensions: [
            common(dark),
            EditorState.readOnly.of(readOnly),
            EditorView.contentAttributes.of({ "aria-label": label }),
            EditorView.updateListener.of((update) => {
                if (update.docChanged && !quiet) {
                    onChange?.(view.state.doc.toString());
                }
            }),
        ],
    });
    return {
        get: () => view.state.doc.toString(),
        set(text) {
            quiet = true;
            view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text } });
            quiet = false;
        },
        focus: () => view.focus(),
        goTo(line) {
            const last = view.state.doc.lines;
            const at = view.state.doc.line(Math.max(1, Math.min(last, line)));
            view.dispatch({
                selection: { anchor: at.from },
                effects: EditorView.scrollIntoView(at.from, { y: "center" }),
            });
            view.focus();
        },
        destroy: () => view.destroy(),
    };
}

// Two texts side by side, the differences marked; neither can be edited.
export function createDiff(parent, before, after, { dark = false } = {}) {
    const side = (doc) => ({
        doc,
        extensions: [common(dark), EditorState.readOnly.of(true), EditorView.editable.of(false)],
    });
    const view = new MergeView({
        parent,
        a: side(before),
        b: side(after),
        collapseUnchanged: { margin: 3, minSize: 6 },
        gutter: true,
    });
    return { destroy: () => view.destroy() };
}
