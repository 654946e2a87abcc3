// The time axis that lanes, composition and series share: a column a line of the record.

const LABELS = 92; // pixels to the left of the axis: names and values
const COLUMNS = [32, 64, 130]; // lines in the view: as few as the run has, unless another width was asked for

export class Axis {
  constructor() { this.zoomed = 0; this.first = 0; }

  /** Place line `cursor` so that three quarters of the view lie before it, as far as the record goes. */
  place(history, cursor, width, unit) {
    this.labels = Math.round(LABELS * unit);
    this.column = this.zoomed || Math.max(4, Math.min(28, Math.floor((width - this.labels - 8) / (COLUMNS.find((count) => history.lines.length <= count) ?? COLUMNS.at(-1)))));
    this.columns = Math.max(1, Math.floor((width - this.labels - 8) / this.column));
    const latest = Math.max(history.base, history.end - this.columns);
    this.first = Math.max(history.base, Math.min(latest, cursor - Math.floor(this.columns * 0.75)));
    this.last = Math.min(history.end - 1, this.first + this.columns - 1);
    this.cursor = cursor;
    this.right = this.labels + this.columns * this.column;
  }

  x(line) { return this.labels + (line - this.first) * this.column; }

  lineAt(x) {
    const line = this.first + Math.floor((x - this.labels) / this.column);
    return x >= this.labels && line <= this.last ? line : -1;
  }

  zoom(factor) { this.zoomed = Math.max(2, Math.min(32, Math.round(this.column * factor))); }
}
