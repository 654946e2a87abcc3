"""When things happened to a request, and the latencies people quote, computed from that and nothing else."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTimes:
    """Seconds on whatever clock the engine runs: a real one, or a simulator's. None where it has not happened yet."""

    arrival: float
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)  # when each output token was known
    finished: float | None = None

    def admit(self, now: float) -> None:
        if self.admitted is None:  # coming back after a preemption is not a second arrival
            self.admitted = now

    def token(self, now: float) -> None:
        self.tokens.append(now)

    def finish(self, now: float) -> None:
        self.finished = now

    @property
    def queue_time(self) -> float | None:
        """Arrival to first admission."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token: from arrival, so that waiting counts."""
        return self.tokens[0] - self.arrival if self.tokens else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between one token and the next. n tokens have n - 1."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def e2e(self) -> float | None:
        """Arrival to the end, whatever the end was."""
        return None if self.finished is None else self.finished - self.arrival
