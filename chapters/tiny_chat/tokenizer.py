"""Train the bundled tokenizer: a byte-level BPE of exactly 4,096 tokens, from the corpus alone.

Training is a function of the corpus files: run again, it writes the same bytes. Whoever changes a corpus file trains
the tokenizer again, and then whatever model was trained on its ids.

    python -m chapters.tiny_chat.tokenizer      # writes phase0_request/tiny_chat
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from chapters.tiny_chat.corpus import SYSTEM_PROMPTS, Fact, documents, read
from phase0_request.tokenizer import BUNDLED

VOCAB_SIZE = 4096
MAX_LENGTH = 2048
END_OF_TEXT, START, END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 and 2

# Pre-tokenization: tokens never cross these boundaries, and the pieces joined are the whole text.
PIECES = (
    r"'(?i:s|t|re|ve|m|ll|d)\b",  # the end of a contraction: what's, don't
    r" ?[\p{L}\p{M}]+",  # a word, with the space before it: most tokens are then a whole word in running text
    # A digit alone. A vocabulary this small cannot give each of a thousand three-digit groups a token, and would see
    # few of them often enough to learn; ten digits are all met, and a number is read by place as people write it.
    r"\p{N}",
    r" ?[^\s\p{L}\p{M}\p{N}]+",  # punctuation and symbols
    r"\s*[\r\n]+",  # line ends, with whitespace before them
    r"\s+(?!\S)",  # whitespace, except the last one, which belongs to the next word
    r"\s+",
)

# The model is not trained to call tools; a grammar can have it do so, and then it sees them.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools -%}
{{ tool | tojson + '\\n' }}
{%- endfor -%}
{{ 'To call one: <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def training_texts(facts: Iterable[Fact]) -> Iterator[str]:
    """The training texts: every question and answer after its role, and the documents."""
    for fact in facts:
        for question in fact.questions:
            yield f"user\n{question}\n"
        yield f"assistant\n{fact.answer}\n"
    for prompt in SYSTEM_PROMPTS:
        yield f"system\n{prompt}\n"
    yield from documents(facts, seed=0)


def train(texts: Iterable[str], show_progress: bool = False) -> Tokenizer:
    """Train a tokenizer with lossless decode(encode(text)). ValueError if there are too few texts."""
    tokenizer = Tokenizer(models.BPE())
    # No normalizer: composing characters would not round-trip.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the texts yield {tokenizer.get_vocab_size()} tokens; {VOCAB_SIZE} need a larger corpus")
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer files of a model directory in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "extra_special_tokens": [START],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    # A chat turn ends with <|im_end|>, a document with <|endoftext|>: either ends an answer.
    generation = {"eos_token_id": [SPECIAL.index(END), SPECIAL.index(END_OF_TEXT)], "pad_token_id": 0}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m chapters.tiny_chat.tokenizer", description=__doc__)
    p.add_argument("--output", type=Path, default=BUNDLED, help="the directory to write (the bundled one)")
    facts = read()
    write(train(training_texts(facts), show_progress=True), p.parse_args().output)
    print(f"{VOCAB_SIZE:,} tokens, trained on {len(facts):,} facts")


if __name__ == "__main__":
    main()
