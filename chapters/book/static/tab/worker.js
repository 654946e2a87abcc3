// Runs the repository's Python in a worker. A message {id, call, args} is answered by {id, result} or {id, error}; what
// happens meanwhile is {tell, value}. Everything is loaded from beside this site's own pages.

const here = new URL("../../tab/", self.location);
const bytes = async (name) => {
  const answer = await fetch(new URL(name, here));
  if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer.arrayBuffer();
};
const once = (make) => { let made; return () => (made ??= make()); };
const tell = (what, value) => self.postMessage({ tell: what, value: value?.toJs ? value.toJs({ dict_converter: Object.fromEntries }) : value });

const python = once(async () => {
  const { loadPyodide } = await import(new URL("npm/pyodide/pyodide.mjs", here));
  const [py, course] = await Promise.all([loadPyodide({ indexURL: new URL("npm/pyodide/", here).href }), bytes("course.zip")]);
  py.unpackArchive(course, "zip", { extractDir: "/course" });
  py.runPython("import sys; sys.path.insert(0, '/course')");
  return py;
});

// pytest and Hypothesis, which only checks need.
const tested = once(async () => {
  const [py, libraries] = await Promise.all([python(), bytes("libraries.zip")]);
  py.unpackArchive(libraries, "zip", { extractDir: py.runPython("import site; site.getsitepackages()[0]") });
  py.runPython("import chapters.preload");
  return py.pyimport("chapters.book.tab.judge");
});

const talk = once(async () => {
  const [py, operations, model] = await Promise.all([python(), import("./operations.js"), bytes("model/model.safetensors")]);
  return py.pyimport("chapters.book.tab.talk").Talk(operations, operations.weights(model), tell);
});

const calls = {
  prepare: async () => void (await tested()),
  check: async (exercise, text) => (await tested()).check(exercise, text, (test) => tell("test", test)),
  answer: async (exercise) => (await tested()).answer(exercise),
  exported: async (files) => (await tested()).exported((await python()).toPy(files)),
  play: async (controls) => {
    const py = await python();
    return py.pyimport("chapters.book.tab.scenes").play(py.toPy(controls));
  },
  load: async () => void (await talk()),
  ask: async (number, messages, ...more) => (await talk()).ask(number, (await python()).toPy(messages), ...more),
  stop: async (number) => (await talk()).stop(number),
};

self.onmessage = async ({ data: { id, call, args } }) => {
  try {
    const result = await calls[call](...args);
    const plain = result?.toJs ? result.toJs({ dict_converter: Object.fromEntries }) : result;
    self.postMessage({ id, result: plain });
  } catch (error) {
    self.postMessage({ id, error: error.type ? error.message.trim().split("\n").at(-1) : String(error) });
  }
};
