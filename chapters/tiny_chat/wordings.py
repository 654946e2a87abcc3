"""Wordings: variants of the same question, so that the model learns the subject and not the template.

The held-out examination is written by hand and shares no sentence with what is made here.
"""

import random
import tomllib
from pathlib import Path

from chapters.tiny_chat.corpus import ARTICLES, COURTESIES, Fact

HERE = Path(__file__).parent
OPENER_SHARE = 0.2
CLOSER_SHARE = 0.15
HASTY_SHARE = 0.25  # no capitals, no punctuation
LOST_WORD_SHARE = 0.35  # of questions of at least four words that lose one; some of these lose two
SWAPPED_SHARE = 0.1
FILLER_SHARE = 0.2  # of questions into which a word of no weight slips
PLURAL_SHARE = 0.1
MORE_SHARE = 0.25
WORDING_SHARE = 0.5


class Wordings:
    """Every known way to ask for a fact: the corpus's own, those of `wordings/*.toml`, and those of `habits.toml`."""

    def __init__(self) -> None:
        self.by_fact: dict[str, list[str]] = {}
        for file in sorted((HERE / "wordings").glob("*.toml")):
            for entry in tomllib.loads(file.read_text("utf-8"))["fact"]:
                self.by_fact.setdefault(entry["key"], []).extend(entry["ask"])
        self.habits = tomllib.loads((HERE / "habits.toml").read_text("utf-8"))

    def ask(self, rng: random.Random, fact: Fact) -> str:
        """One way to ask for a fact, said with the carelessness of people."""
        share = rng.random()
        wordings = self.by_fact.get(key(fact), ())
        if wordings and share < WORDING_SHARE:
            question = rng.choice(wordings)
        elif fact.topic and share < WORDING_SHARE + MORE_SHARE:
            question = rng.choice(self.habits["more"][fact.kind]).format(x=_with_article(fact), name=_name(rng, fact))
            question = question[0].upper() + question[1:]
        else:
            question = rng.choice(fact.questions)
        return question if fact.kind in COURTESIES else self.careless(rng, question)

    def careless(self, rng: random.Random, question: str) -> str:
        """The question, perhaps with words lost, swapped or slipped in, an opening, an ending, or typed in haste."""
        words = question.split()
        for share in (LOST_WORD_SHARE, LOST_WORD_SHARE / 3):
            if len(words) >= 4 and rng.random() < share:
                del words[rng.randrange(len(words) - 1)]
        if len(words) >= 4 and rng.random() < SWAPPED_SHARE:
            at = rng.randrange(len(words) - 1)
            words[at], words[at + 1] = words[at + 1], words[at]
        if rng.random() < FILLER_SHARE:
            words.insert(rng.randrange(len(words)), rng.choice(self.habits["fillers"]))
        if rng.random() < OPENER_SHARE:
            opener = rng.choice(self.habits["openers"])
            first = words[0] if opener.endswith(".") else words[0][:1].lower() + words[0][1:]
            words = [opener[:1].upper() + opener[1:], first, *words[1:]]
        text = " ".join(words)
        if rng.random() < CLOSER_SHARE:
            end = text[-1] if text[-1] in "?.!" else ""
            text = f"{text.rstrip('?.!')}{rng.choice((',', ''))} {rng.choice(self.habits['closers'])}{end}"
        return text.lower().rstrip("?.!").replace(",", "") if rng.random() < HASTY_SHARE else text


def key(fact: Fact) -> str:
    """What names a fact in a file of questions: topic and kind ("page table: why"), or the first question of a pair."""
    return f"{fact.topic}: {fact.kind}" if fact.topic else fact.questions[0]


def _name(rng: random.Random, fact: Fact) -> str:
    """The topic, now and then as several of it."""
    countable = rng.random() < PLURAL_SHARE and fact.topic[-1] not in "sgy" and _with_article(fact) != fact.topic
    return f"{fact.topic}s" if countable else fact.topic


def _with_article(fact: Fact) -> str:
    """The topic with its article, as the corpus's own first question has it."""
    for article in ARTICLES:
        x = f"{article} {fact.topic}".strip()
        if any(f" {x}" in f" {question}" for question in fact.questions):
            return x
    return fact.topic
