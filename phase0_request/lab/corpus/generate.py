"""The corpus: facts expanded into questions, chats and running text.

The files and a seed decide all of it, so the tokenizer and the tiny model trained on it can be trained again to the
same result.

    python -m phase0_request.lab corpus.generate      # counts and samples
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict

from phase0_request.lab.corpus.facts import COURTESIES, FOLDER, Fact, read, words

SMALL_TALK = "smalltalk"  # its pairs are in the first person, so documents leave them out
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
# Probability of each optional part of a chat; with these, three chats in five have a single turn.
SYSTEM_SHARE = 0.15
SECOND_SHARE = 0.25
SAME_TOPIC_SHARE = 0.8  # of the second questions
GREETING_SHARE = 0.12
CLOSING_SHARE = 0.12
PAIRS_A_DOCUMENT = 6


class Message(TypedDict):
    """One message of a chat, in the format of chat templates."""

    role: str
    content: str


@dataclass(frozen=True)
class Corpus:
    """All facts, in the order of the files. No question belongs to two facts."""

    facts: tuple[Fact, ...]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every question with its answer."""
        return ((question, fact.answer) for fact in self.facts for question in fact.questions)

    def conversations(self, seed: int, count: int) -> Iterator[list[Message]]:
        """Chats of one to four turns, deterministic for a seed. Every fact has one chat before any has two."""
        rng = random.Random(seed)
        deck: list[Fact] = []
        for _ in range(count):
            if not deck:
                deck = rng.sample(self.facts, len(self.facts))
            yield self._chat(rng, deck.pop())

    def documents(self, seed: int) -> Iterator[str]:
        """Titled paragraphs that state every fact once, without small talk; order and grouping depend on the seed."""
        rng = random.Random(seed)
        facts = [fact for fact in self.facts if not fact.topic and fact.source != SMALL_TALK]
        texts = [f"{topic}\n\n{_paragraph(parts)}\n" for topic, parts in self._topics.items()]
        for source in dict.fromkeys(fact.source for fact in facts):
            loose = [fact for fact in facts if fact.source == source]
            rng.shuffle(loose)
            for start in range(0, len(loose), PAIRS_A_DOCUMENT):
                group = loose[start : start + PAIRS_A_DOCUMENT]
                texts.append(f"{source.capitalize()} notes\n\n{_paragraph(group)}\n")
        rng.shuffle(texts)
        yield from texts

    @cached_property
    def _topics(self) -> dict[str, list[Fact]]:
        topics: dict[str, list[Fact]] = {}
        for fact in self.facts:
            if fact.topic:
                topics.setdefault(fact.topic, []).append(fact)
        return topics

    @cached_property
    def _greetings(self) -> list[Fact]:
        return [fact for fact in self.facts if fact.kind == "greeting"]

    @cached_property
    def _closings(self) -> list[Fact]:
        return [fact for fact in self.facts if fact.kind in ("thanks", "goodbye")]

    def _chat(self, rng: random.Random, fact: Fact) -> list[Message]:
        turns = [_turn(rng, fact)]
        if fact.kind not in COURTESIES:
            if rng.random() < SECOND_SHARE:
                turns += self._second_turn(rng, fact)
            if self._greetings and rng.random() < GREETING_SHARE:
                turns.insert(0, _turn(rng, rng.choice(self._greetings)))
            if self._closings and rng.random() < CLOSING_SHARE:
                turns.append(_turn(rng, rng.choice(self._closings)))
        chat: list[Message] = []
        if rng.random() < SYSTEM_SHARE:
            chat.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for question, answer in turns:
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return chat

    def _second_turn(self, rng: random.Random, fact: Fact) -> list[tuple[str, str]]:
        """A follow-up on the same topic, or a question on another one; None if there is no other."""
        siblings = [other for other in self._topics.get(fact.topic, ()) if other.kind != fact.kind]
        if siblings and rng.random() < SAME_TOPIC_SHARE:
            sibling = rng.choice(siblings)
            return [(rng.choice(FOLLOW_UPS[sibling.kind]), sibling.answer)]
        others = [other for other in self.facts if other.kind not in COURTESIES and other is not fact]
        return [_turn(rng, rng.choice(others))] if others else []


def load(folder: Path = FOLDER) -> Corpus:
    """Load the corpus of a folder of *.toml files. CorpusError names the file and the wrong entry."""
    return Corpus(read(folder))


def _turn(rng: random.Random, fact: Fact) -> tuple[str, str]:
    return rng.choice(fact.questions), fact.answer


def _paragraph(facts: Sequence[Fact]) -> str:
    return " ".join(fact.answer for fact in facts)


def main(arguments: list[str] | None = None) -> int:
    """Print counts and a few samples of the corpus."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m phase0_request.lab corpus.generate", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which samples to show (default: 0)")
    seed = parser.parse_args(arguments).seed
    corpus, console = load(), Console(highlight=False)
    table = Table("file", "facts", "questions", "distinct words", "characters", title="The corpus")
    for column in table.columns[1:]:
        column.justify = "right"
    sources = list(dict.fromkeys(fact.source for fact in corpus.facts))
    for source in [*sources, "all"]:
        part = Corpus(tuple(fact for fact in corpus.facts if source in (fact.source, "all")))
        texts = [text for fact in part.facts for text in (*fact.questions, fact.answer)]
        counts = (len(part.facts), sum(1 for _ in part.pairs()), len({w for t in texts for w in words(t)}))
        table.add_row(source, *(f"{count:,}" for count in (*counts, sum(map(len, texts)))))
    console.print(table)
    for number, chat in enumerate(corpus.conversations(seed, 6), 1):
        console.print(f"\n[bold]Chat {number}[/bold]")
        for message in chat:
            console.print(f"[dim]{message['role']:>9}[/dim]  ", end="")
            console.print(message["content"], markup=False)
    console.print("\n[bold]A document[/bold]")
    console.print(next(corpus.documents(seed)), markup=False)
    return 0
