"""GGUF files: metadata and tensors where llama.cpp's package has written them, and transformers' tokens of a text."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from phase0_request.extras.gguf_file import GGUFHeader, read_header
from phase0_request.extras.gguf_tokenizer import PRE_TOKENIZERS, backend_of
from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import Tokenizer
from tests import gguf_files

ROOT = Path(__file__).parents[2]
TEXTS = [
    "Hello, world! It's what I've said: we'll see.",
    "déjà vu, 12345 and ½ of \u0130 \u5b57\u7b26",
    "def f(x):\n\treturn  x / 2  # half\n\n\n    done  \n",
    "<|im_start|>user\nHi<|im_end|>",
    (ROOT / "chapters/00_request.md").read_text("utf-8")[:4000],
]


def written(file: Path, add: Callable[[Any], object]) -> Path:
    import gguf

    out = gguf.GGUFWriter(str(file), "qwen2")
    out.add_block_count(1)
    add(out)
    gguf_files.close(out)
    return file


def test_the_header_is_what_the_package_wrote(tmp_path: Path) -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    values: dict[str, Any] = {"u8": 200, "i16": -5, "u64": 1 << 40, "f64": 0.1, "flag": True, "name": "ü"}

    def add(out: Any) -> None:
        for name, kind in zip(values, ("uint8", "int16", "uint64", "float64", "bool", "string"), strict=True):
            getattr(out, f"add_{kind}")(name, values[name])
        out.add_array("list", [1, 2, 3])
        out.add_array("words", ["a", "", "bc"])
        out.add_tensor("first", np.zeros(5, np.float16))
        out.add_tensor("second", numbers)

    header = read_header(written(tmp_path / "x.gguf", add))
    assert header.metadata == values | {
        "general.architecture": "qwen2", "qwen2.block_count": 1, "list": [1, 2, 3], "words": ["a", "", "bc"]
    }  # fmt: skip
    assert [(name, tensor.kind, tensor.shape) for name, tensor in header.tensors.items()] == [
        ("first", 1, (5,)),
        ("second", 0, (4, 6)),
    ]
    content = header.file.read_bytes()[header.tensors["second"].start :][: numbers.nbytes]
    assert np.array_equal(np.frombuffer(content, np.float32).reshape(4, 6), numbers)


LETTERS = ["a", "Bc", "DE", "The", " the", "é", "e\u0301", "\u0301", "\u01c5", "ʰ", "字", "符", "ひ", "한", "कं"]
OTHERS = [
    "1",
    "234",
    "½",
    "Ⅷ",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u3000",
    "\u00a0",
    "'s",
    "'RE",
    "'",
    ".",
    "!/",
    "_",
    "$",
    "😁",
]


def mixed(count: int = 300) -> list[str]:
    """Texts in which each rule of a pre-tokenizer has much to do."""
    draw = random.Random(0)
    return ["".join(draw.choices(LETTERS + OTHERS, k=draw.randint(1, 24))) for _ in range(count)]


def with_pre(file: Path, pre: str) -> Path:
    return written(file, lambda out: gguf_files.add_tokenizer(out, pre))


def digits_alone() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


THEIRS = {  # by transformers or tokenizers, where transformers' reader of GGUF files has not the name
    **dict.fromkeys(["gpt-2", "mellum", "trillion"], lambda: GPT2Tokenizer().backend_tokenizer.pre_tokenizer),
    "olmo": lambda: GPTNeoXTokenizer().backend_tokenizer.pre_tokenizer,
    **dict.fromkeys(["smollm", "starcoder", "refact", "minerva-7b"], digits_alone),
}
LLAMA_CPP_ONLY = {"deepseek-coder", "seed-coder"}  # `make test-models` asks llama.cpp


@pytest.mark.parametrize("pre", [name for name in PRE_TOKENIZERS if name not in LLAMA_CPP_ONLY])
def test_a_pre_tokenizer_has_the_pieces_of_transformers(pre: str, tmp_path: Path) -> None:
    header = read_header(with_pre(tmp_path / "x.gguf", pre))
    if pre in THEIRS:
        theirs = THEIRS[pre]()
    else:
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf").backend_tokenizer.pre_tokenizer
        assert pre in GGUF_PRE_TOKENIZER_SPLITS
    ours = backend_of(header).pre_tokenizer
    for text in TEXTS + mixed():
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "llama-bpe", "tekken"])
def test_a_byte_level_vocabulary_has_the_tokens_of_transformers(pre: str, tmp_path: Path) -> None:
    assert_same_tokens(with_pre(tmp_path / "x.gguf", pre))


@pytest.mark.parametrize(
    ("pre", "theirs"),
    [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer), ("olmo", GPTNeoXTokenizer), ("llama-bpe", GPT2Tokenizer)],
)
def test_accents_are_composed_where_transformers_composes_them(pre: str, theirs: type, tmp_path: Path) -> None:
    ours = backend_of(read_header(with_pre(tmp_path / "x.gguf", pre))).normalizer
    assert (ours is None) == (theirs().backend_tokenizer.normalizer is None)


def test_qwen_composes_accents_as_its_tokenizer_json_does(tmp_path: Path) -> None:
    """Neither llama.cpp nor transformers does with a GGUF file."""
    tokenizer = Tokenizer.from_pretrained(written(tmp_path / "x.gguf", gguf_files.add_tokenizer))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_a_sentencepiece_vocabulary_has_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Its merges follow from the scores of its tokens."""
    backend = HFTokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    corpus = [text.replace(" ", "\u2581") for text in TEXTS]
    backend.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    learned = backend.get_vocab()
    pieces = sorted(learned, key=learned.__getitem__)
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]

    def add(out: Any) -> None:
        out.add_tokenizer_model("llama")
        out.add_token_list(tokens)
        out.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))])
        out.add_token_types(kinds)
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_unk_token_id(0)

    file = written(tmp_path / "x.gguf", add)
    assert_same_tokens(file, [text for text in TEXTS if not text.startswith("<|")])
    tokenizer = Tokenizer.from_pretrained(file)
    assert tokenizer.encode("Hello")[0] == 1
    assert tokenizer.decode(tokenizer.encode("Hello, \u5b57\u7b26 \U0001f600")) == "Hello, \u5b57\u7b26 \U0001f600"


def assert_same_tokens(file: Path, texts: list[str] = TEXTS) -> None:
    ours = Tokenizer.from_pretrained(file)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in texts:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_conversations_are_those_of_the_directory_that_the_file_was_made_of(tmp_path: Path) -> None:
    bundled, ours = (
        Tokenizer.from_pretrained(),
        Tokenizer.from_pretrained(written(tmp_path / "x.gguf", gguf_files.add_tokenizer)),
    )
    chat = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Hello!"}]
    assert ours.chat(chat) == bundled.chat(chat)
    assert (ours.eos_ids, ours.vocab_size) == (bundled.eos_ids, bundled.vocab_size)


def with_tokens(file: Path, *tokens: str) -> Path:
    """The last is unused."""

    def add(out: Any) -> None:
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre("qwen2")
        out.add_token_list(tokens)
        out.add_token_types([*[1] * (len(tokens) - 1), 5])
        out.add_token_merges(["a b"])

    return written(file, add)


def test_an_answer_of_gpt_oss_ends_with_a_call_though_its_file_names_one_end(tmp_path: Path) -> None:
    """As llama.cpp has it: <|end|> is between two messages of one answer."""
    tokens = ["<|return|>", "<|end|>", "<|call|>", "a"]
    for kind, ends in (("gpt-oss", (0, 2)), ("llama", (0,))):
        metadata = {"general.architecture": kind, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
        assert GGUFHeader(tmp_path, metadata, {}).eos_ids == ends


def test_tokens_that_pad_the_vocabulary_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(with_tokens(tmp_path / "x.gguf", "a", "b", "ab", "[PAD3]"))
    assert (tokenizer.vocab_size, tokenizer.encode("aab"), tokenizer.name(3)) == (3, [0, 2], None)


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """As llama.cpp does: of one text there would be two ids, and of one id no token."""
    with pytest.raises(ConfigError, match="its tokens 1 and 3 are both 'b'"):
        Tokenizer.from_pretrained(with_tokens(tmp_path / "x.gguf", "a", "b", "ab", "b", "[PAD4]"))


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("bert", "qwen2", r"its tokenizer is 'bert'; known are gpt2, llama; --tokenizer names another"),
        ("gpt2", "jais", r"its pre-tokenizer is 'jais'; known are gpt-2, mellum, .*; --tokenizer names another"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_named(model: str, pre: str, message: str, tmp_path: Path) -> None:
    def add(out: Any) -> None:
        out.add_tokenizer_model(model)
        out.add_tokenizer_pre(pre)
        out.add_token_list(["a"])

    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_pretrained(written(tmp_path / "x.gguf", add))


COUNTS = struct.pack("<QQ", 1, 1)
NAME = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no GGUF file that can be read"),
        (b"PK\3\4" + bytes(40), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + COUNTS, "its version is 1; supported are 2 and 3"),
        (b"GGUF" + struct.pack("<I", 3) + COUNTS + struct.pack("<Q", 1 << 60), "where 1152921504606846976 more must"),
        (b"GGUF" + struct.pack("<I", 3) + COUNTS + NAME + struct.pack("<I", 77), "a value is of the unknown type 77"),
        (
            b"GGUF" + struct.pack("<I", 3) + COUNTS + NAME + struct.pack("<IIQ", 9, 9, 1),
            "array is of the unknown",
        ),
        (b"GGUF" + struct.pack("<I", 3) + COUNTS + NAME + struct.pack("<IIQ", 9, 12, 1 << 20), "more must follow"),
        (b"GGUF" + struct.pack("<I", 3) + COUNTS + NAME + struct.pack("<IIQ", 9, 7, 1 << 60), "at most 2097152 are"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + NAME + struct.pack("<I", 1 << 31), "at most 4 are possible"),
        (b"GGUF" + struct.pack("<IQQ", 3, 700_000, 0), "it holds 700000 tensors or entries; at most 32768 are read"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (NAME + struct.pack("<IB", 0, 0)), "it holds 'k' twice"),
    ],
)
def test_a_damaged_header_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_header(tmp_path / "x.gguf")
