"""`python -m phase6_integration.lab peers.real_models`: models with trained weights, beside transformers and llama.cpp.

Each is a model with a short name (`nanoserve models`), or a GGUF file. On the same file: the tokens of texts and of
conversations, the mean negative log-likelihood of a passage, and the first tokens of greedy answers. transformers
computes in float32. The exit code is 1 if they differ by more than the rounding of numbers explains.

`--study` also measures on the model what the book says of quantization and of structured output: the likelihood of the
passage with weights, or keys and values, rounded further, and answers to questions as JSON, judged by sense.
"""

import json
import random
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import pre_tokenizers

from phase0_request.extras.gguf_file import read_header
from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.extras.outcome import extras_of
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.engine.hub import directory_of
from phase6_integration.extras.structured.output_grammar import json_grammar
from phase6_integration.lab.peers.models import transformers_model
from phase6_integration.lab.structured import violation
from phase6_integration.support.named_models import offered

LLAMA = Path("build/peers/llama")
MISSING = (
    "llama.cpp is not in {}: `bash phase6_integration/lab/peers/setup.sh llama` compiles it in some seven minutes, or "
    "`python -m venv V; V/bin/pip install llama-cpp-python` makes an environment of your own, for --llama V"
)
CHAPTERS = Path("chapters")
SCRIPTS = "Ἀρχὴ παντός. Всё течёт. 一期一会、12月3日。 한국어도 됩니다. हिन्दी में भी। مرحبا بالعالم ½"
CODE = "def f(x: int) -> str:\n\treturn f'{x:>08.3f}'  # it's 100%\n\n\nI'VE said: \"DON'T\"  \r\n  3,141,592.65"
QUESTIONS = (
    "What is the capital of France?", "Why is the sky blue?", "Write a haiku about the sea.", "What is 12 + 30?",
    "Name three animals that live in water.", "Explain a cache to a child.",
    "Who wrote Hamlet?", "What is bread made of?",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Ireland": "Dublin",
    "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
    "Thailand": "Bangkok", "Hungary": "Budapest",
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
    "required": ["country", "capital"], "additionalProperties": False,
}  # fmt: skip
ROUNDED: dict[str, dict[str, Any]] = {  # options, of the weights of the file
    "bfloat16": {}, "int8": {"quantization": "int8"}, "fp8": {"quantization": "fp8"}, "int4": {"quantization": "int4"},
    "kv_int8": {"kv_cache_dtype": "int8"}, "kv_fp8": {"kv_cache_dtype": "fp8"},
}  # fmt: skip
PIECES, PASSAGE, ANSWER = 200, 1200, 16  # texts, and tokens
CLOSE = 0.01  # of the likelihood, in float32
Messages = list[dict[str, str]]


def texts() -> list[str]:
    """Pieces of the book, prose and code, some cut in words, and texts in many scripts."""
    draw, pages = random.Random(0), [page.read_text("utf-8") for page in sorted(CHAPTERS.glob("0?_*.md"))]
    cuts = [(page, draw.randrange(len(page)), draw.randint(1, 400)) for page in draw.choices(pages, k=PIECES)]
    return [SCRIPTS, CODE, *(page[start : start + length] for page, start, length in cuts)]


def conversations() -> list[Messages]:
    """Such as a template must render: a question, a system prompt, and several turns."""
    ask: Messages = [{"role": "user", "content": QUESTIONS[0]}]
    system: Messages = [{"role": "system", "content": "Answer in one word."}]
    return [ask, system + ask, [*system, *ask, {"role": "assistant", "content": "Paris."}, *ask]]


def passage_of(tokenizer: Tokenizer) -> list[int]:
    text = (CHAPTERS / "00_request.md").read_text("utf-8")
    return tokenizer.encode(text, add_special_tokens=False)[:PASSAGE]


def nll(engine: NanoServingEngine, passage: Sequence[int]) -> float:
    (done,) = engine.generate([passage], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    scores = [scores.logprob for scores in extras_of(done.request).prompt_logprobs]
    return -sum(scores) / len(scores)


def greedy(engine: NanoServingEngine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    return [answer.output_tokens for answer in engine.generate(prompts, params, progress=False)]


def ours(file: Path, passage: Sequence[int], prompts: Sequence[Sequence[int]], **options: Any) -> dict[str, Any]:
    with NanoServingEngine.from_pretrained(file, **options) as engine:
        return {"nll": nll(engine, passage), "answers": greedy(engine, prompts)}


def transformers_tokenizer(file: Path) -> Any:
    """transformers' reader of GGUF files does not know all pre-tokenizers: SmolLM's is as in its tokenizer.json."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if read_header(file).metadata.get("tokenizer.ggml.pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


@torch.inference_mode()
def theirs(model: Any, passage: Sequence[int], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """By transformers."""
    ids = torch.tensor([passage])
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    answers = []
    for prompt in prompts:  # `generate` would either end at an EOS token, or never draw one
        ids, past, said = torch.tensor([prompt]), None, list[int]()
        while len(said) < ANSWER:
            out = model(ids, past_key_values=past, use_cache=True)
            ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
            said.append(int(ids))
        answers.append(said)
    return {"nll": -float(scores.mean()), "answers": answers}


def llama(python: Path, file: Path, threads: int, asked: dict[str, Any]) -> dict[str, Any]:
    command = [str(python), str(Path(__file__).with_name("ask_llama.py")), str(file), str(threads)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp has failed: {done.stderr[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def same(some: Sequence[Any], others: Sequence[Any]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def agreeing(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first one that differs."""
    total = 0
    for one, other in zip(some, others, strict=True):
        total += next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return total / sum(map(len, some))


def compared(file: Path, dense: Path, threads: int, python: Path | None) -> dict[str, Any]:
    """The engine as it serves and in float32, transformers in float32, and llama.cpp if it is here."""
    tokenizer, other = Tokenizer.from_pretrained(file), transformers_tokenizer(file)
    passage, pieces = passage_of(tokenizer), texts()
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in pieces]
    talks = conversations() if tokenizer.chat_template else []  # a base model has none
    chats = [tokenizer.chat(messages) for messages in talks]
    rendered = [
        other.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        for messages in talks
    ]
    prompts = [
        tokenizer.chat([{"role": "user", "content": asked}]) if talks else tokenizer.encode(asked)
        for asked in QUESTIONS
    ]
    model = transformers_model(file)
    model.hf_quantizer = None  # it would not be saved
    del model.config.quantization_config
    model.save_pretrained(dense)
    oracle = theirs(model, passage, prompts)
    exact = ours(dense, passage, prompts, dtype="float32", threads=threads)
    served = ours(file, passage, prompts, threads=threads)
    figures: dict[str, Any] = {
        "texts": len(pieces), "conversations": len(chats), "passage": len(passage), "answers": len(prompts),
        "float32": {"nll": exact["nll"], "greedy": agreeing(exact["answers"], oracle["answers"])},
        "served": {"nll": served["nll"], "greedy": agreeing(served["answers"], oracle["answers"])},
        "transformers": {
            "texts": same(tokens, [other.encode(text, add_special_tokens=False) for text in pieces]),
            "conversations": same(chats, rendered), "nll": oracle["nll"],
        },
    }  # fmt: skip
    if python is not None:
        said = llama(python, file, threads, {"texts": pieces, "passage": passage, "prompts": prompts, "output": ANSWER})
        figures["llama"] = {
            "texts": same(tokens, said["texts"]), "nll": said["nll"], "version": said["version"],
            "greedy": agreeing(said["answers"], oracle["answers"]),
        }  # fmt: skip
    return figures


def wrong(figures: dict[str, Any]) -> list[str]:
    """What differs by more than rounding explains."""
    exact, served, other, cpp = (figures.get(name) for name in ("float32", "served", "transformers", "llama"))
    assert exact is not None
    assert served is not None
    assert other is not None
    checks = {
        "tokens of texts, transformers": other["texts"] == figures["texts"],
        "tokens of conversations, transformers": other["conversations"] == figures["conversations"],
        "likelihood, transformers": abs(exact["nll"] - other["nll"]) < CLOSE,
        "greedy tokens, transformers": exact["greedy"] == 1,
        "likelihood as served": abs(served["nll"] - exact["nll"]) < 20 * CLOSE,
        "tokens of texts, llama.cpp": cpp is None or cpp["texts"] == figures["texts"],
        "likelihood as served, llama.cpp": cpp is None or abs(served["nll"] - cpp["nll"]) < 20 * CLOSE,
    }
    return [name for name, right in checks.items() if not right]


def rounded(file: Path, dense: Path, threads: int) -> dict[str, float]:
    """The likelihood of the passage with the file as it is, and with its weights rounded again."""
    passage, figures = passage_of(Tokenizer.from_pretrained(file)), dict[str, float]()
    for name, options in {"file": {}, **ROUNDED}.items():
        model = file if name == "file" else dense
        with NanoServingEngine.from_pretrained(model, dtype="bfloat16", threads=threads, **options) as engine:
            figures[name] = nll(engine, passage)
    return figures


def as_json(file: Path, threads: int) -> dict[str, dict[str, int]]:
    """Capitals as JSON, asked for in words, and with the schema too: how many are valid, and how many are right."""
    figures = {}
    with NanoServingEngine.from_pretrained(file, threads=threads) as engine:
        tokenizer = Tokenizer.from_pretrained(file)
        words = "What is the capital of {}? Answer with a JSON object that has the keys country and capital."
        prompts = [tokenizer.chat([{"role": "user", "content": words.format(country)}]) for country in CAPITALS]
        for name, grammar in (("words", None), ("schema", json_grammar(SCHEMA))):
            params = SamplingParams(temperature=0, max_tokens=96, grammar=grammar)
            said = [answer.text for answer in engine.generate(prompts, params, progress=False)]
            valid = [violation(SCHEMA, text) is None for text in said]
            right = [
                fits and json.loads(text)["capital"] == city
                for text, fits, city in zip(said, valid, CAPITALS.values(), strict=True)
            ]
            named = [city in text for text, city in zip(said, CAPITALS.values(), strict=True)]
            figures[name] = {"asked": len(said), "valid": sum(valid), "right": sum(right), "named": sum(named)}
    return figures


def show(console: Console, name: str, figures: dict[str, Any]) -> None:
    columns = [figures.get(key, {}) for key in ("float32", "served", "transformers", "llama")]

    def row(words: str, key: str, form: str) -> list[str]:
        return [words, *(form.format(of[key]) if key in of else "" for of in columns)]

    rows = [
        row(f"same tokens, of {figures['texts']} texts", "texts", "{}"),
        row(f"same tokens, of {figures['conversations']} chats", "conversations", "{}"),
        row(f"nats/token, of {figures['passage']}", "nll", "{:.4f}"),
        row("greedy as transformers'", "greedy", "{:.0%}"),
    ]
    console.print(table((name, "float32", "as served", "transformers", "llama.cpp"), rows), "")


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab peers.real_models", __doc__)
    p.add_argument("models", nargs="*", metavar="MODEL", help="short names or GGUF files (all short names that load)")
    p.add_argument("--llama", type=Path, default=LLAMA, metavar="DIR", help="of llama-cpp-python (%(default)s)")
    p.add_argument("--threads", type=at_least_one, default=2, help="of each engine (%(default)s)")
    p.add_argument("--study", action="store_true", help="also quantization and structured output")
    options, console = p.parse_args(arguments), Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(options.threads)
    python = options.llama / "bin/python"
    if not python.exists():
        console.print(MISSING.format(options.llama), markup=False)
    figures, faults = dict[str, Any](), list[str]()
    for name in options.models or offered():
        try:
            file = directory_of(name)
        except ConfigError as error:
            p.error(str(error))
        with tempfile.TemporaryDirectory() as folder:
            dense = Path(folder)
            of_model = compared(file, dense, options.threads, python if python.exists() else None)
            show(console, Path(name).stem, of_model)
            faults += [f"{name}: {fault}" for fault in wrong(of_model)]
            if options.study:
                of_model["rounded"] = rounded(file, dense, options.threads)
                console.print(table(("nats/token with", ""), of_model["rounded"].items(), 4), "")
                of_model["as_json"] = as_json(file, options.threads)
                rows = [(way, *counts.values()) for way, counts in of_model["as_json"].items()]
                console.print(table(("capitals as JSON, by", "asked", "valid", "right", "named"), rows), "")
        figures[Path(name).stem] = of_model
    for fault in faults:
        console.print(f"[red]differs[/red]: {fault}")
    finish(p, options, arguments, figures)
    return 1 if faults else 0
