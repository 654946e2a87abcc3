"""The tokenizer of a GGUF file: its metadata hold the vocabulary, the merges and the kinds of tokens. How a text is cut
before that they only name, by a word of llama.cpp's; `SPLITS` has what the words mean.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_QWEN, _LLAMA = rf"{_WORDS}\p{{N}}{_REST}", rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {  # the name of a pre-tokenizer, and the patterns that cut a text, one after the other
    "gpt-2": (_GPT2,), "qwen2": (_QWEN,), "deepseek-r1-qwen": (_QWEN,),
    "llama-bpe": (_LLAMA,), "llama3": (_LLAMA,), "llama-v3": (_LLAMA,), "tekken": (_TEKKEN,),
    "smollm": (r"\p{N}", _GPT2),
}  # fmt: skip
WHOLE_WORDS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "tekken",
)  # a word of the vocabulary needs no merges, and a BOS precedes


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
    split = header.get("tokenizer.ggml.pre", str)
    if split not in SPLITS:
        raise ConfigError(
            f"{header.file}: its pre-tokenizer is {split!r}; known are {', '.join(SPLITS)}; --tokenizer names another"
        )
    merges = [tuple(merge.split(" ")) for merge in header.get("tokenizer.ggml.merges", list)]
    whole = split in WHOLE_WORDS
    backend = HFTokenizer(BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=whole))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[split]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if _QWEN in SPLITS[split]:
        backend.normalizer = normalizers.NFC()
    return backend, whole


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
