import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from phase0_request import Detokenizer, Tokenizer
from phase0_request.tokenizer import BUNDLED

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a page?"},
    {"role": "assistant", "content": "Sixteen tokens."},
    {"role": "user", "content": "\u4f60\u597d?"},
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED, local_files_only=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED, tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))


@given(text=st.text(max_size=60))
def test_encode_equals_transformers(text: str, tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.encode(text) == reference.encode(text)


def test_texts_are_neither_padded_nor_cut_whatever_the_file_says(directory: Path, tokenizer: Tokenizer) -> None:
    """transformers drops both in each call. Fault: of several prompts, the shorter ones were padded."""
    padding = {"strategy": "BatchLongest", "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    edit(directory / "tokenizer.json", padding={**padding, "pad_to_multiple_of": None}, truncation=truncation)
    texts = ["a", "a longer text than three tokens"]
    assert Tokenizer.from_pretrained(directory).encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@given(tokens=st.lists(st.integers(0, 4095), max_size=30))
def test_decode_equals_transformers(tokens: list[int], tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_equals_transformers(add_generation_prompt: bool, tokenizer: Tokenizer, reference: Any) -> None:
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert "".join(tokenizer.render(CHAT, add_generation_prompt)) == expected
    assert tokenizer.chat(CHAT, add_generation_prompt) == reference.encode(expected, add_special_tokens=False)


def test_eos_ids_are_the_union_of_all_files(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=7)
    edit(directory / "config.json", eos_token_id=[8, 9])
    edit(directory / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    assert Tokenizer.from_pretrained(directory).eos_ids == {2, 7, 8, 9}
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert Tokenizer.from_pretrained(directory).eos_ids == frozenset()


def test_the_chat_template_may_be_in_tokenizer_config(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    edit(directory / "tokenizer_config.json", chat_template="{{ bos_token }}{{ messages[0].content }}", bos_token="<s>")
    assert "".join(Tokenizer.from_pretrained(directory).render(CHAT)) == "<s>Be brief."
    edit(
        directory / "tokenizer_config.json",
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    )
    assert "".join(Tokenizer.from_pretrained(directory).render(CHAT)) == "yes"
    edit(directory / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_pretrained(directory).render(CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% broken",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_pretrained(directory)
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        tokenizer.render(CHAT)


def test_an_oversized_template_and_no_messages_are_refused(directory: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="at least one message"):
        tokenizer.render([])
    (directory / "chat_template.jinja").write_text("x" * (1 << 24) + "y")
    with pytest.raises(ValueError, match="longer than 16777216 bytes"):
        Tokenizer.from_pretrained(directory)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in .*save_pretrained"):
        Tokenizer.from_pretrained(tmp_path)


def sentencepiece(decoder: decoders.Decoder) -> HFTokenizer:
    """A SentencePiece vocabulary: words with a mark for the space before them, and bytes as <0xAB>."""
    as_bytes = (f"<0x{b:02X}>" for b in range(256))
    entries = ["<unk>", "<s>", *as_bytes, *("\u2581", "\u2581Hello", "\u2581wor", "ld", "\u4f60")]
    backend = HFTokenizer(models.BPE(vocab={e: i for i, e in enumerate(entries)}, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


LLAMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize(
    "decoder",
    [LLAMA, decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never")],
    ids=["byte fallback", "metaspace", "metaspace without a prepended space"],
)
@given(data=st.data())
def test_sentencepiece_vocabularies_decode_as_the_library_does(decoder: Any, data: st.DataObject) -> None:
    """Words, spaces and characters as byte tokens, in any order; the special token is skipped."""
    backend = sentencepiece(decoder)
    words = st.sampled_from([[1], [258], [259], [260], [261], [262]])
    as_bytes = st.sampled_from(["\u00e9", "\u4f60", "\U0001f680", "a"]).map(lambda c: [b + 2 for b in c.encode()])
    options = words | as_bytes if decoder is LLAMA else words
    tokens = [t for part in data.draw(st.lists(options, max_size=12)) for t in part]
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokens) == backend.decode(tokens, skip_special_tokens=True)


def test_invalid_bytes_do_not_replace_valid_neighbours() -> None:
    """The documented difference: the library replaces the whole run of byte tokens."""
    backend = sentencepiece(LLAMA)
    tokens = [2 + 0x61, 2 + 0xE4]
    assert backend.decode(tokens) == "\ufffd\ufffd"
    assert Tokenizer(backend).decode(tokens) == "a\ufffd"


def test_ids_that_the_tokenizer_does_not_know_have_no_text() -> None:
    """A hole among its ids, and the padding of the model's embedding beyond them."""
    backend = HFTokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert (tokenizer.vocab_size, tokenizer.decode([0, 3, 5, 6, 151_935])) == (6, "ab")
    assert Detokenizer(tokenizer).push([0, 3, 6, 5]) == "ab"
    with pytest.raises(ValueError, match="from 0, got -1"):
        tokenizer.decode([-1])


def test_half_of_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate pair at character 3"):
        tokenizer.encode("abc\ud800")


def test_a_panic_of_the_library_is_an_ordinary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class derives from BaseException, so it passed every handler that turns errors into answers."""
    panic = type("PanicException", (BaseException,), {})

    class Panics:
        @staticmethod
        def from_file(file: str) -> None:
            raise panic("index out of bounds")

        def encode_batch_fast(self, *_: Any, **__: Any) -> None:
            raise panic("index out of bounds")

    tokenizer = Tokenizer.from_pretrained()
    monkeypatch.setattr(tokenizer, "_backend", Panics())
    with pytest.raises(ValueError, match="the tokenizers library has failed"):
        tokenizer.encode("Hello")
    monkeypatch.setattr("tokenizers.Tokenizer", Panics)
    with pytest.raises(ValueError, match=r"tokenizer\.json holds no tokenizer that can be read"):
        Tokenizer.from_pretrained()


def test_a_streamed_answer_keeps_its_leading_space() -> None:
    """Decoding a complete text drops the space that the tokenizer put in front; an answer is not a complete text."""
    tokenizer = Tokenizer(sentencepiece(LLAMA))
    prompt, answer = [259], [260, 261]
    assert tokenizer.decode(prompt + answer) == "Hello world"
    assert tokenizer.decode(prompt) + Detokenizer(tokenizer).push(answer) == "Hello world"


def test_an_unsupported_decoder_is_refused_on_creation() -> None:
    with pytest.raises(ValueError, match="decoder is WordPiece; supported are ByteLevel"):
        Tokenizer(sentencepiece(decoders.WordPiece()))
    plain = HFTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match="decoder is missing"):
        Tokenizer(plain)


def test_added_tokens_that_are_not_special_have_text() -> None:
    backend = HFTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    backend.add_tokens([AddedToken("<think> caf\u00e9", special=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 4097
    assert tokenizer.decode(tokenizer.encode("x<think> caf\u00e9y")) == "x<think> caf\u00e9y"
