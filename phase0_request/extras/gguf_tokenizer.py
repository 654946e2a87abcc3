"""The tokenizer of a GGUF file: its metadata hold the vocabulary, the merges and the kinds of tokens. How a text is cut
before that they only name, by a word of llama.cpp's; `PRE_TOKENIZERS` has what the words mean.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.models import BPE

from phase0_request.extras.gguf_file import GGUFHeader, read_header
from phase0_request.support.checks import ConfigError, check_int
from phase0_request.support.model_files import TokenizerFiles, naming, unreadable

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # kinds of tokens
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SPACE = "\u2581"
MAX_CHARACTERS = 512  # of a token: more than any has, and few enough to look for all its merges

_CONTRACTION, _START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = rf"{_CONTRACTION}|{_START}\p{{L}}+|\p{{N}}{_REST}"
_LLAMA = rf"{_CONTRACTION}|{_START}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_MARKS = rf"{_CONTRACTION}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
_SEED = rf"{_CONTRACTION}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _by_case(contraction: str, number: str) -> str:
    """A capital after a small letter begins a word."""
    words = "|".join(f"{_START}{word}{contraction}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"


class PreTokenizer(NamedTuple):
    """How a text is cut before its pieces are merged."""

    patterns: tuple[str, ...]  # which cut it, one after the other
    whole: bool = False  # a word of the vocabulary needs no merges, and a BOS precedes
    composed: bool = False  # characters and their accents are one first


_NAMES = {  # by llama.cpp's names, as far as they belong to families that load or will
    "gpt-2 mellum trillion": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,), composed=True),
    "smollm starcoder refact minerva-7b": PreTokenizer((r"\p{N}", _GPT2)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": PreTokenizer((_QWEN,), composed=True),
    "qwen35": PreTokenizer((_MARKS,), composed=True),
    "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2": PreTokenizer((_LLAMA,), whole=True),
    "dbrx smaug-bpe": PreTokenizer((_LLAMA,)),
    "tekken": PreTokenizer((_by_case("", r"\p{N}"),), whole=True),
    "gpt-4o llama4": PreTokenizer((_by_case(f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    "seed-coder": PreTokenizer((_SEED,)),
}  # fmt: skip
PRE_TOKENIZERS = {name: kind for names, kind in _NAMES.items() for name in names.split()}


def has_tokenizer(file: Path) -> bool:
    return bool(read_header(file).metadata.get("tokenizer.ggml.model", "none") != "none")


def read(file: Path) -> TokenizerFiles:
    """The tokenizer of a file, with its chat template and special tokens."""
    header = read_header(file)
    with unreadable(file):
        backend = backend_of(header)
    template = header.get("tokenizer.chat_template", str, "") or None
    with naming(file):
        return TokenizerFiles(file, backend, header.eos_ids, template, named_tokens(header))


def named_tokens(header: GGUFHeader) -> dict[str, str]:
    """The special tokens by the names that chat templates use."""
    tokens = header.get("tokenizer.ggml.tokens", list)
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in NAMED.items()}
    return {
        name: tokens[check_int(name, token, 0, len(tokens) - 1)] for name, token in ids.items() if token is not None
    }


def backend_of(header: GGUFHeader) -> HFTokenizer:
    """The tokenizer, without what concerns conversations. ConfigError if it is of a kind that is not supported."""
    tokens = header.get("tokenizer.ggml.tokens", list)
    kinds = header.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    scores = header.get("tokenizer.ggml.scores", list, [0.0] * len(tokens))
    if not len(kinds) == len(scores) == len(tokens):
        raise ConfigError(
            f"{header.file} must hold a type and a score for each of its {len(tokens)} tokens, got {len(kinds)} and "
            f"{len(scores)}"
        )
    if not all(isinstance(token, str) and len(token) <= MAX_CHARACTERS for token in tokens):
        raise ConfigError(f"{header.file}: its tokens must be text of at most {MAX_CHARACTERS} characters")
    if not all(isinstance(kind, int) for kind in kinds):
        raise ConfigError(f"{header.file}: the types of its tokens must be integers")
    vocabulary: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != UNUSED and vocabulary.setdefault(token, i) != i:
            raise ConfigError(f"{header.file}: its tokens {vocabulary[token]} and {i} are both {token!r}")
    model = header.get("tokenizer.ggml.model", str)
    if model not in BUILDERS:
        raise ConfigError(
            f"{header.file}: its tokenizer is {model!r}; known are {', '.join(BUILDERS)}; --tokenizer names another"
        )
    backend, bos = BUILDERS[model](header, vocabulary)
    special = {token for token, i in vocabulary.items() if kinds[i] in (UNKNOWN, CONTROL)}
    added = [token for token, i in vocabulary.items() if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=token in special, normalized=False) for token in added])
    if around := _around(header, bos):
        backend.post_processor = around
    return backend


def _byte_level(header: GGUFHeader, vocabulary: Mapping[str, int]) -> tuple[HFTokenizer, bool]:
    """GPT-2's kind of BPE. Its bytes are characters of an alphabet."""
    name = header.get("tokenizer.ggml.pre", str)
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{header.file}: its pre-tokenizer is {name!r}; known are {', '.join(PRE_TOKENIZERS)}; --tokenizer names "
            "another"
        )
    kind = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in header.get("tokenizer.ggml.merges", list)]
    backend = HFTokenizer(BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=kind.whole))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if kind.composed:
        backend.normalizer = normalizers.NFC()
    return backend, kind.whole


def _sentencepiece(header: GGUFHeader, vocabulary: Mapping[str, int]) -> tuple[HFTokenizer, bool]:
    """SentencePiece's BPE. A byte without a token of its own is <0x00> to <0xFF>."""
    scores = header.get("tokenizer.ggml.scores", list)
    unknown = named_tokens(header).get("unk_token")
    model = BPE(
        vocab=dict(vocabulary),
        merges=[pair for _, _, pair in sorted(_merges(vocabulary, scores))],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = HFTokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.get("tokenizer.ggml.add_space_prefix", bool, True):
        spaces, decoding = [normalizers.Prepend(SPACE), *spaces], [*decoding, decoders.Strip(" ", 1, 0)]
    backend.normalizer, backend.decoder = normalizers.Sequence(spaces), decoders.Sequence(decoding)
    return backend, True


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}  # by llama.cpp's names


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> Iterator[tuple[float, int, tuple[str, str]]]:
    """The pairs of tokens that make another, in the order of its score: SentencePiece merges the highest first."""
    for token, i in vocabulary.items():
        for cut in range(1, len(token)):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                yield -scores[i], cut, (token[:cut], token[cut:])


def _around(header: GGUFHeader, bos: bool) -> processors.TemplateProcessing | None:
    """The tokens put around a text. `bos`: whether it begins with the BOS token if the file does not say."""
    names, tokens = named_tokens(header), header.get("tokenizer.ggml.tokens", list)

    def token(name: str, default: bool) -> list[str]:
        return [names[name]] if name in names and header.get(f"tokenizer.ggml.add_{name}", bool, default) else []

    first, last = token("bos_token", bos), token("eos_token", False)
    if not first + last:
        return None
    ids = [(token, tokens.index(token)) for token in dict.fromkeys(first + last)]
    return processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=ids)
