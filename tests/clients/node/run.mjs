// node run.mjs FILE SCENARIO: runs one exported function of a file of scenarios; the server is in the environment.
const [, , file, scenario] = process.argv;
const server = { baseURL: process.env.SERVER_URL, apiKey: process.env.SERVER_KEY };
await (await import(`./${file}.mjs`))[scenario](server, process.env.SERVER_MODEL);
