"""Rewording: variants of the same question, so that the model learns the subject and not the template.

The held-out examination is written by hand and shares no sentence with what is made here.
"""

import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from phase0_request.lab.corpus.facts import ARTICLES, COURTESIES, Fact

# What else is asked about a topic. {x} has the article, {name} has none, {is_} agrees with neither and is always "is".
MORE = {
    "what": (
        "Could you tell me what {x} is?",
        "Please describe {x} briefly.",
        "Give me a short definition of {name}.",
        "I'd like to know what {x} is.",
        "What exactly is {x}?",
        "What is meant by {name}?",
        "Do you know what {x} is?",
        "What's the meaning of {name}?",
        "{name}: what is that?",
        "Help me understand what {x} is.",
        "So what would you call {x}?",
        "Who or what is {x}?",
        "Say what {x} is.",
        "I have never heard of {x}.",
    ),
    "why": (
        "What is the point of {x}?",
        "What is {x} good for?",
        "Why would I want {x}?",
        "Why do people care about {x}?",
        "What is the use of {x}?",
        "Could you tell me why {x} matters?",
        "What's so important about {x}?",
        "Why do we need {x}?",
        "Why bother with {x}?",
        "What problem does {x} solve?",
    ),
    "how": (
        "What does {x} do, step by step?",
        "Could you explain how {x} works?",
        "How would you explain the way {x} works?",
        "In what way does {x} work?",
        "What happens inside {x}?",
        "Walk me through {x}.",
        "How does {x} actually work?",
        "What are the steps of {x}?",
        "How is {x} done?",
    ),
}
OPENERS = (
    "please",
    "hey,",
    "hi,",
    "hello,",
    "ok,",
    "so,",
    "well,",
    "quick question:",
    "question:",
    "tell me,",
    "one thing:",
    "new here.",
    "I am new to this.",
    "sorry, basic question:",
    "for my notes:",
    "I was wondering,",
    "just curious:",
    "my colleague asked me,",
    "I keep reading about this.",
    "remind me,",
    "help me out:",
    "I forgot,",
    "by the way,",
    "a student asks:",
    "I have to explain this tomorrow.",
    "in this field,",
    "in serving,",
    "not sure I get this.",
)
CLOSERS = (
    "please",
    "thanks",
    "exactly",
    "in short",
    "in a few words",
    "briefly",
    "in simple terms",
    "then",
    "again",
    "if you know",
    "for a beginner",
    "in one sentence",
    "in practice",
    "anyway",
    "I wonder",
    "can you tell me",
    "nobody could tell me",
    "I never got that",
    "in plain words",
    "for me",
    "to you",
    "really",
)
FILLERS = (
    "a",
    "the",
    "of",
    "to",
    "in",
    "it",
    "that",
    "this",
    "my",
    "your",
    "some",
    "any",
    "really",
    "actually",
    "just",
    "for",
    "with",
    "when",
    "there",
    "one",
    "these",
    "can",
    "do",
    "does",
    "is",
    "are",
    "we",
    "people",
    "me",
    "about",
    "so",
    "such",
)
OPENER_SHARE = 0.2
CLOSER_SHARE = 0.15
HASTY_SHARE = 0.25  # no capitals, no punctuation
LOST_WORD_SHARE = 0.35  # of questions of at least four words that lose one; some of these lose two
SWAPPED_SHARE = 0.1
FILLER_SHARE = 0.2  # of questions into which a word of no weight slips
PLURAL_SHARE = 0.1
MORE_SHARE = 0.25
WORDING_SHARE = 0.5


class Rewording:
    """Every way that is known to ask for a fact: the corpus's own, `wordings_*.toml` beside this file, and MORE."""

    def __init__(self, wordings: Mapping[str, Sequence[str]]) -> None:
        self.wordings = wordings

    @classmethod
    def load(cls, folder: Path = Path(__file__).parent) -> "Rewording":
        found: dict[str, list[str]] = {}
        for file in sorted(folder.glob("wordings_*.toml")):
            for entry in tomllib.loads(file.read_text("utf-8"))["fact"]:
                found.setdefault(entry["key"], []).extend(entry["ask"])
        return cls(found)

    def ask(self, rng: random.Random, fact: Fact) -> str:
        """One way to ask for a fact, said with the carelessness of people."""
        draw = rng.random()
        wordings = self.wordings.get(key(fact), ())
        if wordings and draw < WORDING_SHARE:
            question = rng.choice(wordings)
        elif fact.topic and draw < WORDING_SHARE + MORE_SHARE:
            question = rng.choice(MORE[fact.kind]).format(x=_with_article(fact), name=_name(rng, fact))
            question = question[0].upper() + question[1:]
        else:
            question = rng.choice(fact.questions)
        return question if fact.kind in COURTESIES else careless(rng, question)


def careless(rng: random.Random, question: str) -> str:
    """The question, perhaps with words lost, swapped or slipped in, an opening, an ending, or typed in haste."""
    words = question.split()
    for share in (LOST_WORD_SHARE, LOST_WORD_SHARE / 3):
        if len(words) >= 4 and rng.random() < share:
            del words[rng.randrange(len(words) - 1)]
    if len(words) >= 4 and rng.random() < SWAPPED_SHARE:
        at = rng.randrange(len(words) - 1)
        words[at], words[at + 1] = words[at + 1], words[at]
    if rng.random() < FILLER_SHARE:
        words.insert(rng.randrange(len(words)), rng.choice(FILLERS))
    if rng.random() < OPENER_SHARE:
        opener = rng.choice(OPENERS)
        first = words[0] if opener.endswith(".") else words[0][:1].lower() + words[0][1:]
        words = [opener[:1].upper() + opener[1:], first, *words[1:]]
    text = " ".join(words)
    if rng.random() < CLOSER_SHARE:
        end = text[-1] if text[-1] in "?.!" else ""
        text = f"{text.rstrip('?.!')}{rng.choice((',', ''))} {rng.choice(CLOSERS)}{end}"
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
