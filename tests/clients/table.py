"""`python tests/clients/table.py BEFORE NOW` prints README.md: the scenarios that pass, in two folders of reports."""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

HEAD = """\
# Clients

`make clients` installs the clients of [`.ci/clients.in`](../../.ci/clients.in) into an environment of their own, starts
`nanoserve serve` with the bundled model, and runs their scenarios: what each client promises its users, from a text to
an agent's steps. The official client for Python is tested by the suite
([test_openai_client.py](../phase6_integration/test_openai_client.py)).

The bundled model is small, so scenarios with tools require a call, one an answer. What the model is not forced to do,
it may do or not.

Scenarios that pass, of all: at commit {before}, and now. `make clients` and
`python -m pytest --junitxml build/clients/openai.xml tests/phase6_integration/test_openai_client.py` write reports;
`python tests/clients/table.py BEFORE build/clients` prints this page, with the reports of another commit in BEFORE.
"""
NAMES = {
    "agents_sdk": "OpenAI Agents SDK",
    "autogen": "AutoGen",
    "instructor": "instructor",
    "langchain": "LangChain",
    "litellm": "LiteLLM",
    "llama_index": "LlamaIndex",
    "lm_eval": "lm-eval",
    "node test_ai_sdk": "AI SDK (Node)",
    "node test_openai": "openai (Node)",
    "pydantic_ai": "Pydantic AI",
    "test_openai_client": "openai (Python)",
}


def outcomes(folder: str) -> dict[str, dict[str, list[bool]]]:
    """Of each client and test: whether each of its cases passed."""
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    reports = sorted(Path(folder).glob("*.xml"))
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        client = case.attrib["classname"].rpartition(".")[2].removeprefix("with_")
        test, _, variant = case.attrib["name"].partition("[")
        if client == "node":
            client, test = f"node {test}", variant.rstrip("]")
        passed = not {"failure", "error", "skipped"} & {child.tag for child in case}
        found[client][test.removeprefix("test_").replace("_", " ")].append(passed)
    return found


def count(cases: list[bool]) -> str:
    return f"{sum(cases)} of {len(cases)}" if cases else "-"


def flat(tests: dict[str, list[bool]]) -> list[bool]:
    return [case for cases in tests.values() for case in cases]


def page(before: str, now: str) -> str:
    old, new = outcomes(before), outcomes(now)
    clients = sorted(new, key=lambda client: NAMES[client].lower())
    lines = [HEAD.format(before="bcc901d"), "| client | before | now |", "|---|---|---|"]
    lines += [f"| {NAMES[one]} | {count(flat(old[one]))} | {count(flat(new[one]))} |" for one in clients]
    every = [[case for tests in one.values() for case in flat(tests)] for one in (old, new)]
    lines.append(f"| all | {count(every[0])} | {count(every[1])} |")
    for client in clients:
        lines += ["", f"## {NAMES[client]}", "", "| scenario | before | now |", "|---|---|---|"]
        lines += [f"| {test} | {count(old[client][test])} | {count(cases)} |" for test, cases in new[client].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(*sys.argv[1:]))
