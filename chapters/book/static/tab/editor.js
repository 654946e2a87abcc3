// A small Python editor: CodeMirror 6, its packages as the registry has them, by the page's import map.

import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { bracketMatching, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { EditorState } from "@codemirror/state";
import { EditorView, drawSelection, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";

export class Editor {
  constructor(parent, changed) {
    this.extensions = [
      lineNumbers(), history(), drawSelection(), highlightActiveLine(), bracketMatching(), python(), indentUnit.of("    "),
      syntaxHighlighting(classHighlighter), keymap.of([...defaultKeymap, ...historyKeymap, indentWithTab]),
      EditorState.tabSize.of(4), EditorView.contentAttributes.of({ "aria-label": "The file of the exercise. Escape, then Tab leaves it." }),
      EditorView.updateListener.of((update) => update.docChanged && changed(update.state.doc.toString())),
    ];
    this.view = new EditorView({ parent, extensions: this.extensions });
    this.view.scrollDOM.tabIndex = 0; // it scrolls, by keys too
  }

  get text() {
    return this.view.state.doc.toString();
  }

  // Show a text, from the first line of code after `mark`.
  show(text, mark) {
    this.view.setState(EditorState.create({ doc: text, extensions: this.extensions }));
    const marked = text.indexOf(mark), at = marked + text.slice(marked).search(/^ *[^# \n]/m);
    if (marked >= 0) {
      this.view.dispatch({ selection: { anchor: at }, effects: EditorView.scrollIntoView(at, { y: "start", yMargin: 0 }) });
    }
  }
}
