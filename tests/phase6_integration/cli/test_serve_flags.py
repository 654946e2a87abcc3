"""The flags of `nanoserve serve`: the fields that they set, and what is refused."""

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from phase0_request.support.flags import Parser
from phase6_integration.api.settings import ServerSettings
from phase6_integration.cli.main import main
from phase6_integration.engine.options import EngineOptions
from phase6_integration.extras.edge.edge_settings import EdgeSettings
from phase6_integration.extras.kv_events.kv_events_options import KVEventsOptions
from phase6_integration.serve_flags import add_flags, options_from, settings_from

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "chapters/reference.md"


CONTRACT = """host port dtype device max-model-len max-num-seqs max-num-batched-tokens block-size page-size
    kv-cache-pages gpu-memory-utilization enable-prefix-caching no-enable-prefix-caching enable-chunked-prefill
    no-enable-chunked-prefill scheduling-policy served-model-name api-key chat-template enforce-eager seed
    async-scheduling allowed-origins uds root-path ssl-keyfile
    ssl-certfile ssl-ca-certs ssl-cert-reqs revision download-dir tokenizer generation-config
    override-generation-config
    max-num-queued-reqs request-timeout shutdown-timeout max-body-bytes max-logprobs log-level log-format"""


def parser() -> Parser:
    made = Parser(prog="nanoserve serve")
    add_flags(made)
    return made


def parsed(*arguments: str) -> dict[str, Any]:
    return vars(parser().parse_args(arguments))


def test_the_flags_of_the_contract_exist() -> None:
    assert {f"--{name}" for name in CONTRACT.split()} - parser().flags.keys() == set()


def test_the_manifest_for_kubernetes_gives_flags_that_exist() -> None:
    deployment = next(yaml.safe_load_all((ROOT / "phase6_integration/deploy/kubernetes.yaml").read_text()))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    given = parsed(*container["args"])
    assert options_from(given).of(KVEventsOptions).kv_events is not None
    assert settings_from(given, {}).shutdown_timeout == 60


def test_flags_set_the_fields_that_they_name() -> None:
    given = {"model": "x", "dtype": "float32", "device": "auto", "port": 1, "log_level": "error", "page_size": 8}
    assert options_from(given) == EngineOptions(model="x", dtype="float32", page_size=8)
    settings = settings_from(given, {})
    assert (settings.port, settings.log_level, settings.served_model_names) == (1, "error", ("x",))


def test_auto_is_the_default_of_dtype_and_device_only() -> None:
    assert options_from({"dtype": "auto", "device": "auto"}) == EngineOptions()
    assert options_from({"model": "auto"}).model == "auto"
    with pytest.raises(ValueError, match="scheduling_policy"):
        options_from({"scheduling_policy": "auto"})


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--max-model-len", "2k"], "max_model_len", 2_000),
        (["--max-model-len", "2K"], "max_model_len", 2_048),
        (["--max-model-len", "25.6k"], "max_model_len", 25_600),
        (["--max-model-len", "1m"], "max_model_len", 1_000_000),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--max-num-batched-tokens", "8K"], "max_num_batched_tokens", 8_192),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--dtype", "auto"], "dtype", None),
        (["--tokenizer", "org/other"], "tokenizer", "org/other"),
        (["--download-dir", "/models"], "download_dir", "/models"),
        (["--quantization", "none"], "quantization", None),
    ],
    ids=str,
)
def test_values_are_read_as_vllm_reads_them(flags: list[str], field: str, value: object) -> None:
    options = options_from(parsed(*flags))
    assert {**asdict(options), **options.more}[field] == value


def test_flags_of_vllm_that_ask_for_what_is_so_anyway_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    script = "--pipeline-parallel-size 1 --data-parallel-size=1 --swap-space 0 --cpu-offload-gb 0 --task generate"
    script += " --load-format auto --tokenizer-mode auto --disable-log-requests --response-role assistant"
    assert options_from(parsed("m", *script.split())) == EngineOptions(model="m")
    assert settings_from(parsed("m", *script.split()), {}) == settings_from(parsed("m"), {})
    with pytest.raises(SystemExit):
        parsed("m", "--pipeline-parallel-size", "2")
    assert "choose from" in capsys.readouterr().err


def test_the_demo_has_a_small_pool_says_so_and_is_of_the_bundled_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("phase6_integration.serve.serve", lambda *given: served.append(given) or 0)
    assert main(["serve", "--demo", "--max-chunk-size", "32"]) == 0
    ((options, settings, (said,), _),) = served
    assert options == EngineOptions(kv_cache_pages=52, max_num_batched_tokens=96, max_chunk_size=32)
    assert settings.served_model_names == ("tiny_chat",)
    assert "a small pool" in said
    with pytest.raises(SystemExit):
        main(["serve", "--demo", "other"])
    assert "leave it out to serve other" in capsys.readouterr().err


def test_lists_are_values_or_a_json_list_as_in_vllm() -> None:
    pages = ("https://a.example", "https://b.example")
    for given in (pages, ('["https://a.example", "https://b.example"]',)):
        assert settings_from(parsed("--allowed-origins", *given), {}).of(EdgeSettings).allowed_origins == pages
    assert settings_from(parsed("--override-generation-config", '{"top_k": 5}'), {}).override_generation_config == {
        "top_k": 5
    }


def test_on_a_unix_socket_the_host_is_not_checked() -> None:
    settings = settings_from(parsed("--uds", "/run/llm.sock"), {})
    assert (settings.uds, settings.allowed_hosts) == ("/run/llm.sock", ())


def test_the_flags_in_the_table_of_differences_exist() -> None:
    """In the table of what differs from vLLM: the first column is this server's."""
    _, _, table = REFERENCE.read_text("utf-8").partition("| flag | vLLM | nanoserve |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    flags = [flag for row in rows for flag in re.findall(r"--[a-z-]+", row.split("|")[1])]
    assert len(flags) == len(rows) > 5
    assert [flag for flag in flags if flag not in parser().flags] == []
    assert "`--host` | all addresses | 127.0.0.1 |" in table
    assert ServerSettings().host == "127.0.0.1"


def test_the_served_name_of_a_directory_is_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert settings_from({"model": str(tmp_path / "mine")}, {}).served_model_names == ("mine",)
    assert settings_from({}, {}).served_model_names == ("tiny_chat",)
    assert settings_from({"model": "a/b", "served_model_name": ["c", "d"]}, {}).served_model_names == ("c", "d")


def test_api_keys_come_from_flags_and_the_environment() -> None:
    environment = {"NANOSERVE_API_KEY": "c", "VLLM_API_KEY": "d", "OTHER_API_KEY": "e"}
    assert settings_from({"api_key": ["a", "b"]}, environment).of(EdgeSettings).api_keys == ("a", "b", "c", "d")
    assert settings_from({}, {"NANOSERVE_API_KEY": ""}).of(EdgeSettings).api_keys == ()


def test_a_chat_template_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert settings_from({"chat_template": str(file)}, {}).chat_template == "{{ messages }}"
    tagged = "{% generation %}{{ messages }}{% endgeneration %}"
    assert settings_from({"chat_template": tagged}, {}).chat_template == tagged
    with pytest.raises(ValueError, match="chat template"):
        settings_from({"chat_template": str(tmp_path / "none")}, {})
    file.write_text("fine {# so far #}\n{% if %}")
    with pytest.raises(ValueError, match=r"^the chat template has a fault in line 2: Expected an expression"):
        settings_from({"chat_template": str(file)}, {})


WRONG = [
    ["--port", "70000"],
    ["--port", "http"],
    ["--host", ""],
    ["--max-model-len", "0"],
    ["--device", "tpu"],
    ["--request-timeout", "-1"],
    ["--shutdown-timeout", "-1"],
    ["--max-body-bytes", "0"],
    ["--max-logprobs", "1000"],
    ["--log-level", "loud"],
    ["--enforce-eager=yes"],
    ["--max-num-se", "3"],
    ["--chat-template", "no-such-file"],
    ["--chat-template", "{% for %}{"],
    ["--chat-template", "{% break %}"],
    ["--api-key", "sk secret"],
    ["--api-keys=sk-secret"],
    ["model", "sk-secret"],
    ["--max-model-len", "2.5K"],
    ["--max-model-len", "4q"],
    ["--uds", "/tmp/s", "--port", "1"],
    ["--root-path", "llm/"],
    ["--ssl-keyfile", "k.pem"],
    ["--ssl-certfile", "c.pem", "--ssl-ca-certs", "ca.pem"],
    ["--ssl-certfile", "c.pem", "--ssl-cert-reqs", "2"],
    ["--ssl-certfile", "c.pem", "--ssl-cert-reqs", "3"],
    ["--allowed-origins", "[1]"],
    ["--override-generation-config", "[]"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_an_invalid_flag_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "phase6_integration.serve", None)  # nothing is loaded before
    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nanoserve serve: ")
    assert err.count("\n") == 1
    assert "secret" not in err
