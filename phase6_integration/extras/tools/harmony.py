"""HarmonyReader: reads answers in gpt-oss's format, which are messages in channels.

`analysis` has the reasoning, `final` the content, `commentary` calls of tools, or content before them:

    <|channel|>analysis<|message|>Rain? I ask.<|end|><|start|>assistant<|channel|>commentary to=functions.weather
    <|constrain|>json<|message|>{"city": "Bern"}<|call|>
"""

from phase6_integration.extras.tools.tool_reader import Section, ToolReader, Wait

TO = r"to=(?:functions\.)?([\w.-]{1,64})\s{0,4}"
HEADER = (
    rf"(?:<\|start\|>)?(?:assistant)?\s{{0,4}}(?:{TO})?<\|channel\|>(\w{{1,16}})\s{{0,4}}(?:{TO})?"
    r"(?:<\|constrain\|>)?(?:\w{1,16})?\s{0,4}<\|message\|>"
)
END = r"<\|(?:end|call|return)\|>"


class HarmonyReader(ToolReader):
    """Text outside of messages, and messages to what is not among the functions, are content, with their headers."""

    def _answer(self) -> Wait[None]:
        said = False
        if self._begun:
            yield from self._until(END, Section.REASONING)
            self._skip()
        while header := (yield from self._next(HEADER)):
            function, channel = header[1] or header[3], header[2]
            if function in self._functions:
                yield from self._try(self._arguments(function))
                yield from self._until(END, Section.CONTENT)
                self._skip()
                continue
            if function is None:
                self._skip()
            section = Section.REASONING if channel == "analysis" and function is None else Section.CONTENT
            if section is Section.CONTENT and said:
                self._add(section, "\n\n")
            said = said or section is Section.CONTENT
            yield from self._skip_space() if function is None else ()
            yield from self._until(END, section)
            self._skip()
        self._streams = Section.CONTENT
        while True:
            self._at = len(self._text)
            if self._last:
                return
            yield
