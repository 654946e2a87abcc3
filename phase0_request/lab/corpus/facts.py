"""Facts: what the corpus is made of, read from the TOML files beside this module and checked.

A fact is one answer and the many ways to ask for it. A [[topic]] in a file makes up to three facts, what, why and how,
with questions from templates; a [[pair]] makes one, with the questions it lists.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ARTICLES = ("a", "an", "the", "")
COURTESIES = ("greeting", "thanks", "goodbye")  # messages that open or close a chat and ask no question
PAIR_KINDS = ("pair", *COURTESIES)
ASKS = range(3, 6)
ANSWER_WORDS = range(8, 46)  # shorter answers teach no sentence; longer ones are too long for a very small model

# {x} is the name with its article, {name} the name alone.
TEMPLATES = {
    "what": (
        "What is {x}?",
        "What's {x}?",
        "Explain {x}.",
        "Define {x}.",
        "Describe {x}.",
        "Tell me about {x}.",
        "Can you explain {x}?",
        "What do you know about {x}?",
        "I keep hearing about {x}, what is it?",
        "In one sentence, what is {x}?",
        "What is {name}?",
        "Explain {name}.",
        "Define {name}.",
        "What does {name} mean?",
        "{name}?",
    ),
    "why": (
        "Why does {x} matter?",
        "Why is {x} important?",
        "Why should I care about {x}?",
        "What makes {x} important?",
        "Explain why {x} matters.",
        "Tell me why {x} matters.",
        "Why does {name} matter?",
        "Why is {name} important?",
    ),
    "how": (
        "How does {x} work?",
        "How exactly does {x} work?",
        "Explain how {x} works.",
        "Can you explain how {x} works?",
        "Tell me how {x} works.",
        "Describe how {x} works.",
        "How does {name} work?",
    ),
}


class CorpusError(ValueError):
    """A corpus file that cannot be used. The message names the file and the entry."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and all questions for it."""

    where: str  # the file and the entry, for error messages
    source: str  # the file's name without its suffix
    kind: str  # what, why or how of a topic; or one of PAIR_KINDS
    questions: tuple[str, ...]
    answer: str
    topic: str = ""


def read(folder: Path = FOLDER) -> tuple[Fact, ...]:
    """Read every *.toml of a folder. CorpusError names the file, the entry and what is allowed."""
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise CorpusError(f"no *.toml file in {str(folder)!r}; a corpus needs at least one")
    facts = tuple(fact for file in files for fact in _read(file))
    _refuse_repeats(facts)
    return facts


def topic_questions(kind: str, article: str, name: str) -> tuple[str, ...]:
    """The questions for the what, why or how of a topic."""
    x = f"{article} {name}".strip()
    return expand(template.format(x=x, name=name) for template in TEMPLATES[kind])


def expand(questions: Iterable[str]) -> tuple[str, ...]:
    """Each question as written and in lower case without punctuation. Duplicates up to case are dropped."""
    kept: dict[str, str] = {}
    for question in questions:
        hasty = question.lower().rstrip("?.!").replace(",", "")
        for variant in (question, hasty):
            kept.setdefault(variant.casefold(), variant)
    return tuple(kept.values())


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def _read(file: Path) -> Iterator[Fact]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{file.name}: not a TOML file: {error}") from error
    readers = {"topic": _topic, "pair": _pair}
    for name, entries in tables.items():
        if name not in readers or not isinstance(entries, list):
            raise CorpusError(f"{file.name}: {name!r} is not allowed here; a corpus file holds [[topic]] and [[pair]]")
        for number, entry in enumerate(entries, 1):
            if not isinstance(entry, dict):
                raise CorpusError(f"{file.name}: {name} {number} must be a table, got {entry!r}")
            yield from readers[name](f"{file.name}: {name} {number}", file.stem, entry)


def _topic(where: str, source: str, entry: Mapping[str, Any]) -> Iterator[Fact]:
    where = f"{where} ({entry.get('name', 'no name')!r})"
    _refuse_unknown(where, entry, ("name", "article", *TEMPLATES))
    name, article = _line(where, entry, "name"), entry.get("article")
    if article not in ARTICLES:
        raise CorpusError(f"{where}: article must be one of {', '.join(map(repr, ARTICLES))}, got {article!r}")
    for kind in TEMPLATES:
        if kind == "what" or kind in entry:
            answer = _answer(where, entry, kind)
            yield Fact(where, source, kind, topic_questions(kind, article, name), answer, topic=name)


def _pair(where: str, source: str, entry: Mapping[str, Any]) -> Iterator[Fact]:
    ask = entry.get("ask")
    if not isinstance(ask, list) or not all(isinstance(question, str) and question.strip() for question in ask):
        raise CorpusError(f"{where}: ask must be a list of questions, got {ask!r}")
    where = f"{where} ({ask[0] if ask else 'no question'!r})"
    _refuse_unknown(where, entry, ("ask", "answer", "kind"))
    if len(ask) not in ASKS:
        raise CorpusError(f"{where}: ask must hold {ASKS[0]} to {ASKS[-1]} questions, got {len(ask)}")
    if len({question.casefold() for question in ask}) < len(ask):
        raise CorpusError(f"{where}: ask lists a question twice: {ask!r}")
    kind = entry.get("kind", PAIR_KINDS[0])
    if kind not in PAIR_KINDS:
        raise CorpusError(f"{where}: kind must be one of {', '.join(map(repr, PAIR_KINDS))}, got {kind!r}")
    yield Fact(where, source, kind, expand(ask), _answer(where, entry, "answer"))


def _refuse_unknown(where: str, entry: Mapping[str, Any], allowed: Sequence[str]) -> None:
    unknown = sorted(set(entry) - set(allowed))
    if unknown:
        raise CorpusError(f"{where}: unknown key {unknown[0]!r}; allowed are {', '.join(allowed)}")


def _line(where: str, entry: Mapping[str, Any], key: str) -> str:
    text = entry.get(key)
    if not isinstance(text, str) or not text or text != " ".join(text.split()):
        raise CorpusError(f"{where}: {key} must be one line of text with single spaces, got {text!r}")
    return text


def _answer(where: str, entry: Mapping[str, Any], key: str) -> str:
    answer = _line(where, entry, key)
    if len(answer.split()) not in ANSWER_WORDS:
        raise CorpusError(
            f"{where}: {key} must have {ANSWER_WORDS[0]} to {ANSWER_WORDS[-1]} words, got {len(answer.split())}"
        )
    return answer


def _refuse_repeats(facts: Iterable[Fact]) -> None:
    """Raise CorpusError if one question, ignoring case and punctuation, has two answers."""
    asked: dict[tuple[str, ...] | str, Fact] = {}
    for fact in facts:
        for question in fact.questions:
            key = tuple(words(question)) or question
            if asked.setdefault(key, fact) is not fact:
                raise CorpusError(f"{fact.where}: the question {question!r} is also that of {asked[key].where}")
