"""The help of every command: how to ask for it, how wide it is, and what it says of a flag."""

import argparse
import re
from importlib import import_module

import pytest

from phase0_request.support.flags import Parser
from phase6_integration.cli.main import COMMANDS, main


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that ends with status 0."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def flags_of(command: str) -> list[argparse.Action]:
    parser = Parser(prog=command)
    import_module(COMMANDS[command][0]).add_flags(parser)
    hidden = {argparse.SUPPRESS, parser._actions[0].help}  # and --help
    return [action for action in parser._actions if action.help not in hidden]


def test_without_a_command_and_with_help_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [shown(capsys, *arguments) for arguments in ((), ("help",), ("--help",))]
    assert texts[0] == texts[1] == texts[2]
    assert [name for name in COMMANDS if not re.search(rf"^    {name}\b", texts[0], re.MULTILINE)] == []


def test_help_of_a_command_is_what_its_own_flag_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "help", "generate")
    assert text == shown(capsys, "generate", "--help")
    assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], "no such command: srve (did you mean serve?); they are serve, deploy,"),
        (["help", "serv"], "(did you mean serve?)"),
        (["xyz", "--port", "1"], "no such command: xyz; they are"),
        (["--verison"], "no such flag: --verison (did you mean --version?)"),
    ],
)
def test_an_unknown_command_is_one_line_with_the_nearest_and_all(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), words in err) == ("", 1, True), err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_meaning_of_one_line_and_ends_with_its_default(command: str) -> None:
    for action in flags_of(command):
        assert action.help is not None
        assert len(action.help) <= 180, action.help
        assert action.help.endswith(")"), action.help
