"""The whole engine in a tab: the bundled model, a prefix cache, continuous batching, and a record of its steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as HFTokenizer

from phase0_request.core import EngineCore
from phase0_request.detokenizer import Transcript
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.lab.in_numpy.forward import Forward, PagedRunner
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.record.lines import Line, Vocabulary
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.scheduler import Scheduler

PAGES, PAGE_SIZE = 52, 16  # few enough to fill
BUDGET = TokenBudget(32, 64)  # a step is short enough to watch
Tell = Callable[[str, Any], object]
Message = tuple[str, str]  # role, text


class Talk:
    """Answers conversations. `tell` gets ("lines", lines of the record) and ("text", [number, text, finish reason])."""

    def __init__(self, ops: Any, weights: Any, tell: Tell) -> None:
        config = json.loads((BUNDLED / "config.json").read_text("utf-8"))
        self.tell, self.tokenizer = tell, Tokenizer.from_pretrained()
        self.plain = HFTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
        self.plain.encode_special_tokens = True  # the name of a control token in a message is text
        cache = PrefixCache(PAGES, PAGE_SIZE)
        self.context: int = min(config["max_position_embeddings"], cache.max_tokens)
        runner = PagedRunner(Forward(ops, config, weights, cache.max_tokens), cache)
        self.core = EngineCore(Scheduler(cache, self.tokenizer.eos_ids, BUDGET), runner)
        self.vocabulary = Vocabulary(lambda token: self.tokenizer.token_bytes(token, False).decode("utf-8", "replace"))
        self.lines: list[Line] = []
        self.recorder = Recorder(self.core, self.lines.append, text=True, model="tiny_chat")
        self.live: dict[int, tuple[Request, Transcript]] = {}
        self.running: asyncio.Task[None] | None = None

    def ask(
        self, number: int, messages: Sequence[Message], max_tokens: int, temperature: float, to_the_end: bool = False
    ) -> None:
        """Queue a conversation; `to_the_end`: its answer has all `max_tokens`. ValueError if it is too long."""
        prompt = self.prompt(messages)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=to_the_end)
        if len(prompt) + max_tokens > self.context:
            raise ValueError(f"the conversation has {len(prompt)} tokens; with {max_tokens} more, {self.context} fit")
        request = Request(f"{number}", tuple(prompt), params, arrival=self.core.clock())
        self.core.submit(request)
        self.live[number] = request, Transcript(params, self.tokenizer)
        if self.running is None or self.running.done():
            self.running = asyncio.ensure_future(self.run())

    def stop(self, number: int) -> None:
        if number in self.live:
            self.core.abort(self.live[number][0])

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, as tiny_chat's template writes it."""
        start, end = (self.tokenizer.vocabulary[f"<|im_{which}|>"] for which in ("start", "end"))
        tokens: list[int] = []
        for role, text in messages:
            tokens += [start, *self.plain.encode(f"{role}\n{text}").ids, end, *self.plain.encode("\n").ids]
        return [*tokens, start, *self.plain.encode("assistant\n").ids]

    async def run(self) -> None:
        """Step until no request is left. Between two steps, the page may ask and stop."""
        while self.core.has_work:
            step = self.core.step()
            for event in step.events if step else ():
                number = int(event.request.id)
                text = self.live[number][1].add(event.token, event.finish_reason)
                reason = event.finish_reason and event.finish_reason.value
                self.tell("text", [number, text, reason])
                if reason:
                    del self.live[number]
            self.tell("lines", [self.vocabulary.add(line) for line in self.lines])
            self.lines.clear()
            await asyncio.sleep(0)
