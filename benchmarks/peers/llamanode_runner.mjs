// llama.cpp inside node-llama-cpp, whose binaries hold kernels for every generation of x86-64.
//
// The protocol is protocol.py's; the last argument is the folder that node_modules lies in.
// `lookup` is the binding's InputLookupTokenPredictor, which looks in the prompt only.

import {readFileSync} from "node:fs";
import path from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const folder = path.join(process.argv[2], "node_modules", "node-llama-cpp");
const {getLlama, InputLookupTokenPredictor} = await import(
    pathToFileURL(path.join(folder, "dist", "index.js"))
);

const say = (message) => process.stdout.write(JSON.stringify(message) + "\n");

async function load(start) {
    const llama = await getLlama({
        build: "never", gpu: false, progressLogs: false, logLevel: "error", maxThreads: start.threads
    });
    const model = await llama.loadModel({modelPath: start.model});
    const context = await model.createContext({
        contextSize: start.context, threads: start.threads
    });
    const versions = {"node-llama-cpp": JSON.parse(readFileSync(path.join(folder, "package.json"))).version};
    const settings = {system: llama.systemInfo.trim(), lookup: "InputLookupTokenPredictor"};
    return {context, versions, settings};
}

async function generate(context, start, job) {
    const options = {};
    if (start.mode === "lookup") {
        options.tokenPredictor = new InputLookupTokenPredictor({
            patternLength: {min: start.ngram}, predictionLength: {max: start.drafted}
        });
        options.tokenPredictor.updateInputTokens(job.ids);
    }
    const sequence = context.getSequence(options);
    const ids = [];
    const begin = performance.now();
    let first = begin;
    for await (const token of sequence.evaluate(job.ids, {temperature: 0, yieldEogToken: true})) {
        if (ids.length === 0) first = performance.now();
        ids.push(token);
        if (ids.length >= job.max_new_tokens) break;
    }
    const end = performance.now();
    const used = sequence.tokenPredictions.used;
    await sequence.dispose();
    return {
        seconds_prefill: (first - begin) / 1e3,
        seconds_decode: (end - first) / 1e3,
        tokens: ids.length,
        ids,
        rounds: ids.length - 1 - used
    };
}

let started;
try {
    for await (const line of createInterface({input: process.stdin})) {
        const message = JSON.parse(line);
        if (started == null) {
            started = {...await load(message), start: message};
            say({versions: started.versions, settings: started.settings});
        } else if (message.mode !== started.start.mode)
            throw new Error(`started for ${started.start.mode}, asked for ${message.mode}`);
        else
            say(await generate(started.context, started.start, message));
    }
} catch (error) {
    say({error: String(error)});
    process.exitCode = 1;
}
process.exit();
