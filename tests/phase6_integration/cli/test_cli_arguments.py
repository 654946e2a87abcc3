"""Invalid arguments of chat, generate and bench: one line on stderr, exit code 2, and no API key in it."""

import io
import sys

import pytest

from phase6_integration.cli.main import main

SERVER = ["--url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chat", "--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
        (["chat", "--url", "ftp://nowhere"], "a server's URL looks like http://127.0.0.1:8000, got 'ftp://nowhere'"),
        (["chat", "--api-key", "secret"], "--api-key is for a server; name it with --url"),
        (["chat", *SERVER, "--api-key", "secret\r\nx: y"], "an API key must be printable ASCII"),
        (["chat", *SERVER, "--device", "cpu"], "--device is for a local model"),
        (["chat", "--max-length=secret"], "no such flag: --max-length"),
        (["chat", "--temprature", "1"], "no such flag: --temprature (did you mean --temperature?)"),
        (["serve", "--max-model-length=1", "--q"], "--max-model-length (did you mean --max-model-len?), --q"),
        (["chat", "--max-tokens", "many"], "--max-tokens: an integer such as 4096, 4k (4,000) or 4K (4,096) is needed"),
        (["generate"], "no prompt: there is no line with text in it"),
        (["generate", "", "a"], "a prompt is empty"),
        (["generate", "a", "--file", "b"], "prompts or --file, not both"),
        (["generate", "--file", "no-such-file"], "No such file"),
        (["bench", "--concurrency", "0"], "concurrency must be an integer from 1"),
        (["bench", "--goodput", "fast:1"], "an SLO is one of ttft, tpot, itl, e2el"),
        (["bench", "--no-stream", "--goodput", "ttft:1"], "without streaming there is no TTFT"),
        (["bench", "--json", "/no/such/place"], "No such file or directory"),
        (
            ["bench", "serve", "--endpoint", "/v1"],
            "endpoint must be one of /v1/completions, /v1/chat/completions, got '/v1'",
        ),
    ],
)
def test_invalid_arguments_are_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nanoserve {arguments[0]}: ")
    assert words in err
    assert err.count("\n") == 1
    assert "secret" not in err
