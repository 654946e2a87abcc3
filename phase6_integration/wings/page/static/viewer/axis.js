// The time axis that lanes, composition and series share: a column a line of the record.

export const LABELS = 92; // pixels to the left of the axis: names and values

export class Axis {
  constructor() { this.column = 8; this.first = 0; }

  /** Place line `cursor` so that three quarters of the view lie before it, as far as the record goes. */
  place(history, cursor, width) {
    this.width = width;
    this.columns = Math.max(1, Math.floor((width - LABELS - 8) / this.column));
    const latest = Math.max(history.base, history.end - this.columns);
    this.first = Math.max(history.base, Math.min(latest, cursor - Math.floor(this.columns * 0.75)));
    this.last = Math.min(history.end - 1, this.first + this.columns - 1);
    this.cursor = cursor;
    this.right = LABELS + this.columns * this.column;
  }

  x(line) { return LABELS + (line - this.first) * this.column; }

  lineAt(x) {
    const line = this.first + Math.floor((x - LABELS) / this.column);
    return x >= LABELS && line <= this.last ? line : -1;
  }

  zoom(factor) { this.column = Math.max(2, Math.min(32, Math.round(this.column * factor))); }
}
