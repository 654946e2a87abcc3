"""The corpus: facts, read from the TOML files in `corpus/` and checked, and running text made of them.

A fact is one answer and the many ways to ask for it. A [[topic]] in a file makes up to three facts, what, why and how,
with questions from templates; a [[pair]] makes one, with the questions it lists.
"""

import random
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

FOLDER = Path(__file__).parent / "corpus"
ARTICLES = ("a", "an", "the", "")
COURTESIES = ("greeting", "thanks", "goodbye")  # messages that open or close a chat and ask no question
PAIR_KINDS = ("pair", *COURTESIES)
SMALL_TALK = "smalltalk"  # its pairs are in the first person, so documents leave them out
ASKS = range(3, 6)
ANSWER_WORDS = range(8, 46)  # shorter answers teach no sentence; longer ones are too long for a very small model
PAIRS_A_DOCUMENT = 6

# {x} is the name with its article, {name} the name alone.
TEMPLATES = {
    "what": (
        "What is {x}?", "What's {x}?", "Explain {x}.", "Define {x}.", "Describe {x}.", "Tell me about {x}.",
        "Can you explain {x}?", "What do you know about {x}?", "I keep hearing about {x}, what is it?",
        "In one sentence, what is {x}?", "What is {name}?", "Explain {name}.", "Define {name}.",
        "What does {name} mean?", "{name}?",
    ),
    "why": (
        "Why does {x} matter?", "Why is {x} important?", "Why should I care about {x}?", "What makes {x} important?",
        "Explain why {x} matters.", "Tell me why {x} matters.", "Why does {name} matter?", "Why is {name} important?",
    ),
    "how": (
        "How does {x} work?", "How exactly does {x} work?", "Explain how {x} works.", "Can you explain how {x} works?",
        "Tell me how {x} works.", "Describe how {x} works.", "How does {name} work?",
    ),
}  # fmt: skip
# Follow-up questions, when the topic is known from the previous turn.
FOLLOW_UPS = {
    "what": ("And what is it?", "What is it, exactly?", "But what is it?"),
    "why": ("Why does it matter?", "Why is that important?", "And why does that matter?", "Why should I care?"),
    "how": ("How does it work?", "How does that work?", "And how does it work?", "Can you explain how it works?"),
}
SYSTEM_PROMPTS = (
    "You are tiny chat, a very small language model.",
    "You are a helpful assistant.",
    "Answer in one or two short sentences.",
)


class CorpusError(ValueError):
    """A corpus file that cannot be used. The message names the file and the entry."""


class Message(TypedDict):
    """One message of a chat, in the format of chat templates."""

    role: str
    content: str


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
    """All facts, in the order of the files. CorpusError names the file, the entry and what is allowed."""
    facts = tuple(fact for file in sorted(folder.glob("*.toml")) for fact in _read(file))
    asked: dict[tuple[str, ...] | str, Fact] = {}
    for fact in facts:
        for question in fact.questions:
            other = asked.setdefault(tuple(words(question)) or question, fact)
            if other is not fact:
                raise CorpusError(f"{fact.where}: the question {question!r} is also that of {other.where}")
    return facts


def documents(facts: Iterable[Fact], seed: int) -> list[str]:
    """Titled paragraphs that state every fact once, without small talk; order and grouping depend on the seed."""
    rng, topics, loose = random.Random(seed), dict[str, list[str]](), dict[str, list[str]]()
    for fact in facts:
        if fact.topic:
            topics.setdefault(fact.topic, []).append(fact.answer)
        elif fact.source != SMALL_TALK:
            loose.setdefault(fact.source, []).append(fact.answer)
    texts = [f"{topic}\n\n{' '.join(answers)}\n" for topic, answers in topics.items()]
    for source, answers in loose.items():
        rng.shuffle(answers)
        for start in range(0, len(answers), PAIRS_A_DOCUMENT):
            group = " ".join(answers[start : start + PAIRS_A_DOCUMENT])
            texts.append(f"{source.capitalize()} notes\n\n{group}\n")
    rng.shuffle(texts)
    return texts


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def expand(questions: Iterable[str]) -> tuple[str, ...]:
    """Each question as written and in lower case without punctuation. Duplicates up to case are dropped."""
    kept: dict[str, str] = {}
    for question in questions:
        hasty = question.lower().rstrip("?.!").replace(",", "")
        for variant in (question, hasty):
            kept.setdefault(variant.casefold(), variant)
    return tuple(kept.values())


def _read(file: Path) -> Iterator[Fact]:
    """The facts of a file. A fault in an entry is named with it."""
    for table, entries in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for number, entry in enumerate(entries, 1):
            name = entry.get("name") or (entry.get("ask") or ["no question"])[0]
            where = f"{file.name}: {table} {number} ({name!r})"
            try:
                yield from {"topic": _topic, "pair": _pair}[table](where, entry)
            except (KeyError, TypeError, ValueError) as error:
                raise CorpusError(f"{where}: {error}") from None


def _topic(where: str, entry: dict[str, Any]) -> Iterator[Fact]:
    name, article, answers = entry.pop("name"), entry.pop("article"), entry
    x = f"{article} {name}".strip()
    if article not in ARTICLES or not {"what"} <= set(answers) <= set(TEMPLATES):
        raise ValueError(
            f"it has a name, an article of {', '.join(map(repr, ARTICLES))}, what, and perhaps why and how"
        )
    for kind, answer in answers.items():
        questions = expand(template.format(x=x, name=name) for template in TEMPLATES[kind])
        yield Fact(where, where.partition(".")[0], kind, questions, _checked(answer), topic=name)


def _pair(where: str, entry: dict[str, Any]) -> Iterator[Fact]:
    ask, kind = entry["ask"], entry.get("kind", PAIR_KINDS[0])
    if not set(entry) <= {"ask", "answer", "kind"} or kind not in PAIR_KINDS or len(ask) not in ASKS:
        known = ", ".join(PAIR_KINDS)
        raise ValueError(f"it has {ASKS[0]} to {ASKS[-1]} questions to ask, an answer, and a kind of {known}")
    if len({text.casefold() for text in ask}) < len(ask):
        raise ValueError("ask lists a question twice")
    yield Fact(where, where.partition(".")[0], kind, expand(ask), _checked(entry["answer"]))


def _checked(answer: str) -> str:
    words = answer.split()
    if answer != " ".join(words) or len(words) not in ANSWER_WORDS:
        raise ValueError(f"an answer is a line of {ANSWER_WORDS[0]} to {ANSWER_WORDS[-1]} words, got {answer!r}")
    return answer
