// The operations of phase2_prefill_decode/lab/in_numpy, over typed arrays. A matrix is its numbers, and how many a row has.

class Matrix {
  constructor(rows, columns, data = new Float32Array(rows * columns)) {
    Object.assign(this, { rows, columns, data });
  }
}

// The tensors of a safetensors file in bfloat16, which is the upper half of a float32.
export function weights(buffer) {
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, start - 8)));
  delete header.__metadata__;
  return new Map(Object.entries(header).map(([name, { shape, data_offsets: [first, last] }]) => {
    const bits = Uint32Array.from(new Uint16Array(buffer.slice(start + first, start + last)), (half) => half << 16);
    const columns = shape.at(-1);
    return [name, new Matrix(bits.length / columns, columns, new Float32Array(bits.buffer))];
  }));
}

export const zeros = (rows, columns) => new Matrix(rows, columns);
export const integers = (list) => Int32Array.from(list.toJs());
export const sequences = (list) => list.toJs();

export function rows(table, numbers) {
  const out = new Matrix(numbers.length, table.columns);
  numbers.forEach((number, row) => out.data.set(rowOf(table, number), row * table.columns));
  return out;
}

const rowOf = ({ data, columns }, row) => data.subarray(row * columns, (row + 1) * columns);

// x @ weight.T: four sums at a time, which a processor can compute beside each other.
export function linear(x, weight) {
  const out = new Matrix(x.rows, weight.rows), depth = x.columns;
  for (let row = 0; row < weight.rows; row++) {
    const w = rowOf(weight, row);
    for (let token = 0; token < x.rows; token++) {
      const given = rowOf(x, token);
      let a = 0, b = 0, c = 0, d = 0;
      for (let i = 0; i < depth; i += 4) {
        a += given[i] * w[i];
        b += given[i + 1] * w[i + 1];
        c += given[i + 2] * w[i + 2];
        d += given[i + 3] * w[i + 3];
      }
      out.data[token * weight.rows + row] = a + b + c + d;
    }
  }
  return out;
}

export const add = (x, y) => new Matrix(x.rows, x.columns, x.data.map((number, i) => number + y.data[i]));
export const gated = (gate, up) =>
  new Matrix(up.rows, up.columns, gate.data.map((number, i) => (number / (1 + Math.exp(-number))) * up.data[i]));

export function norm(x, weight, eps) {
  const out = new Matrix(x.rows, x.columns), size = weight.data.length;
  for (let first = 0; first < x.data.length; first += size) {
    let squares = 0;
    for (let i = 0; i < size; i++) squares += x.data[first + i] ** 2;
    const scale = 1 / Math.sqrt(squares / size + eps);
    for (let i = 0; i < size; i++) out.data[first + i] = x.data[first + i] * scale * weight.data[i];
  }
  return out;
}

export function rotate(x, positions, headDim, theta) {
  const out = new Matrix(x.rows, x.columns), half = headDim / 2;
  positions.forEach((position, row) => {
    for (let i = 0; i < half; i++) {
      const angle = position * theta ** ((-2 * i) / headDim), cos = Math.cos(angle), sin = Math.sin(angle);
      for (let head = row * x.columns; head < (row + 1) * x.columns; head += headDim) {
        const first = x.data[head + i], second = x.data[head + half + i];
        out.data[head + i] = first * cos - second * sin;
        out.data[head + half + i] = second * cos + first * sin;
      }
    }
  });
  return out;
}

export function store(pages, slots, fresh) {
  slots.forEach((slot, row) => pages.data.set(rowOf(fresh, row), slot * pages.columns));
}

// Each token attends to the tokens of its sequence up to itself, read from their slots.
export function attend(q, keys, values, sequences, headDim) {
  const out = new Matrix(q.rows, q.columns), heads = q.columns / headDim, group = q.columns / keys.columns;
  for (const [row, count, position, slots] of sequences) {
    const scores = new Float64Array(slots.length);
    for (let token = 0; token < count; token++) {
      for (let head = 0; head < heads; head++) {
        const query = (row + token) * q.columns + head * headDim, column = Math.floor(head / group) * headDim;
        const seen = position + token + 1;
        let highest = -Infinity, sum = 0;
        for (let s = 0; s < seen; s++) {
          const key = slots[s] * keys.columns + column;
          let score = 0;
          for (let i = 0; i < headDim; i++) score += q.data[query + i] * keys.data[key + i];
          scores[s] = score / Math.sqrt(headDim);
          highest = Math.max(highest, scores[s]);
        }
        for (let s = 0; s < seen; s++) sum += scores[s] = Math.exp(scores[s] - highest);
        for (let s = 0; s < seen; s++) {
          const value = slots[s] * values.columns + column, share = scores[s] / sum;
          for (let i = 0; i < headDim; i++) out.data[query + i] += share * values.data[value + i];
        }
      }
    }
  }
  return out;
}

export const argmax = (x, row) => rowOf(x, row).reduce((best, number, i, all) => (number > all[best] ? i : best), 0);
export const row = (x, number) => Array.from(rowOf(x, number));
