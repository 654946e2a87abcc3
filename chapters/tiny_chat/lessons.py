"""Lessons: the texts the model is trained on, and how they become batches of tokens."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from chapters.tiny_chat.corpus import COURTESIES, FOLLOW_UPS, SYSTEM_PROMPTS, Fact, Message, documents
from chapters.tiny_chat.wordings import Wordings
from phase0_request.tokenizer import Tokenizer

IGNORED = -100  # the target that torch's cross entropy leaves out
SORTED_TOGETHER = 512  # lessons laid side by side by length, so that little of a batch is padding
LONG_SHARE = 0.04  # lessons that are one chat about many things: turns long past what a single answer needs
LONG_TURNS = range(6, 12)
TEXT_SHARE = 0.06  # lessons that are running text, for completions without a chat
SYSTEM_SHARE = 0.15
SECOND_SHARE = 0.2
SAME_TOPIC_SHARE = 0.7
COURTESY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Lesson:
    """Tokens, and which of them the model must learn to say: its own answers and their ends."""

    tokens: tuple[int, ...]
    learned: tuple[bool, ...]


class Lessons:
    """An endless course over a corpus, decided by its seed. Every fact is asked once before any is asked again."""

    def __init__(self, facts: Sequence[Fact], tokenizer: Tokenizer, seed: int) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self._courtesies = [fact for fact in facts if fact.kind in COURTESIES]
        self._reword = Wordings()
        self._deck: list[Fact] = []
        self._topics: dict[str, list[Fact]] = {}
        for fact in facts:
            if fact.topic:
                self._topics.setdefault(fact.topic, []).append(fact)

    def __iter__(self) -> Iterator[Lesson]:
        texts: list[str] = []
        while True:
            draw = self.rng.random()
            if draw < TEXT_SHARE:
                texts = texts or documents(self.facts, self.rng.randrange(1 << 30))
                yield self._text(texts.pop())
            elif draw < TEXT_SHARE + LONG_SHARE:
                turns = self.rng.choice(LONG_TURNS)
                yield self._chat([turn for _ in range(turns) for turn in self._turns(self._next())])
            else:
                yield self._chat(self._turns(self._next()))

    def _next(self) -> Fact:
        if not self._deck:
            self._deck = self.rng.sample(self.facts, len(self.facts))
        return self._deck.pop()

    def _turns(self, fact: Fact) -> list[tuple[str, str]]:
        rng = self.rng
        turns = [(self._reword.ask(rng, fact), fact.answer)]
        if fact.kind not in COURTESIES:
            if rng.random() < COURTESY_SHARE:
                courtesy = rng.choice(self._courtesies)
                turns.insert(
                    0 if courtesy.kind == "greeting" else 1, (self._reword.ask(rng, courtesy), courtesy.answer)
                )
            if rng.random() < SECOND_SHARE:
                siblings = [other for other in self._topics.get(fact.topic, ()) if other.kind != fact.kind]
                if siblings and rng.random() < SAME_TOPIC_SHARE and turns[-1][1] is fact.answer:
                    sibling = rng.choice(siblings)
                    turns.append((rng.choice(FOLLOW_UPS[sibling.kind]), sibling.answer))
                else:
                    other = self._next()
                    turns.append((self._reword.ask(rng, other), other.answer))
        return turns

    def _chat(self, turns: list[tuple[str, str]]) -> Lesson:
        messages: list[Message] = []
        if self.rng.random() < SYSTEM_SHARE:
            messages.append({"role": "system", "content": self.rng.choice(SYSTEM_PROMPTS)})
        tokens: list[int] = []
        learned: list[bool] = []
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            asked = self.tokenizer.chat(messages)
            learned += [False] * (len(asked) - len(tokens))
            messages.append({"role": "assistant", "content": answer})
            tokens = self.tokenizer.chat(messages, add_generation_prompt=False)
            learned += [True] * (len(tokens) - len(learned) - 1) + [
                False
            ]  # the newline after the end is the template's
        return Lesson(tuple(tokens), tuple(learned))

    def _text(self, text: str) -> Lesson:
        tokens = [*self.tokenizer.encode(text), 0]
        return Lesson(tuple(tokens), (False, *(True for _ in tokens[1:])))


def batches(lessons: Lessons, tokens: int, longest: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each [rows, length] and about `tokens` in all; targets are IGNORED where not learned.

    Lessons of like length share a batch, in an order decided by the lessons' seed."""
    course = iter(lessons)
    while True:
        group = sorted(islice(course, SORTED_TOGETHER), key=lambda lesson: len(lesson.tokens))
        rows: list[list[Lesson]] = [[]]
        for lesson in group:
            width = min(len(lesson.tokens), longest)
            if rows[-1] and (len(rows[-1]) + 1) * width > tokens:
                rows.append([])
            rows[-1].append(lesson)
        lessons.rng.shuffle(rows)
        for row in rows:
            yield _padded(row, longest)


def _padded(lessons: list[Lesson], longest: int) -> tuple[Tensor, Tensor]:
    width = min(max(len(lesson.tokens) for lesson in lessons), longest) - 1
    inputs = torch.zeros(len(lessons), width, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, lesson in enumerate(lessons):
        tokens = torch.tensor(lesson.tokens[: width + 1])
        learned = torch.tensor(lesson.learned[: width + 1])
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, : len(tokens) - 1] = torch.where(learned[1:], tokens[1:], IGNORED)
    return inputs, targets
