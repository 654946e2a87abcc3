"""`nanoserve pull` against a hub on this machine, which huggingface_hub asks as it asks the real one."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phase0_request.tokenizer import BUNDLED
from phase6_integration.engine.hub import directory_of
from tests.gguf_files import saved_gguf
from tests.phase2_prefill_decode.models import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {name: (BUNDLED / name).read_bytes() for name in ("config.json", "model.safetensors", "tokenizer.json")}
REPOSITORIES = {
    "org/model": FILES | {"pickled.bin": b"no"},
    "org/other": {"config.json": b'{"model_type": "bert"}', "model.safetensors": b"x" * 99},
    "org/gguf": {"model.gguf": b"GGUF"},
    "org/quantized": dict.fromkeys(
        [
            "model-Q4_K_M.gguf",
            "model.i1-IQ3_XXS.gguf",
            "mmproj-F16.gguf",
            "UD-Q4_K_XL/model-UD-Q4_K_XL.gguf",
            "Q8_0/model-Q8_0-00001-of-00002.gguf",
            "Q8_0/model-Q8_0-00002-of-00002.gguf",
        ],
        b"GGUF",
    ),
}
SPLIT = (
    "has 2 files of Q8_0: Q8_0/model-Q8_0-00001-of-00002.gguf, Q8_0/model-Q8_0-00002-of-00002.gguf. This engine reads"
)
REFUSED = {"org/gated": (403, "GatedRepo"), "org/private": (401, "RepoNotFound")}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/models").strip("/").split("/")
        repository, rest = "/".join(path[:2]), path[2:]
        files, file = REPOSITORIES.get(repository), "/".join(rest[2:])
        if files is None or (rest[0] == "resolve" and file not in files):
            status, code = REFUSED.get(repository, (404, "RepoNotFound" if files is None else "EntryNotFound"))
            return self._reply(status, b"", {"x-error-code": code})
        if rest[0] == "resolve":
            content = files[file]
            self.asked.append(file)
            return self._reply(200, content, {"etag": f'"{hashlib.sha256(content).hexdigest()}"'})
        tree = [{"type": "file", "path": name, "size": len(c), "oid": "0" * 40} for name, c in files.items()]
        siblings = [{"rfilename": name} for name in files]
        about = {"id": repository, "sha": COMMIT, "siblings": siblings}
        return self._reply(200, json.dumps(tree if rest[0] == "tree" else about).encode())

    do_HEAD = do_GET  # noqa: N815

    def _reply(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"x-repo-commit": COMMIT, "content-length": f"{len(content)}", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    Hub.asked = []
    file = tmp_path_factory.mktemp("model") / "model.gguf"
    saved_gguf(tiny_model("llama"), file, lambda name: "F16")
    REPOSITORIES["org/quantized"]["model-Q4_K_M.gguf"] = file.read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def pull(
    endpoint: str, folder: Path, *arguments: str, code: str = "", offline: str = "0"
) -> "subprocess.CompletedProcess[str]":
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": offline}
    script = f"{code}\nfrom phase6_integration.cli.main import main\nraise SystemExit(main())"
    command = [sys.executable, "-c", script, "pull", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | own, timeout=120)


def test_a_model_is_downloaded_after_its_size_is_said_and_then_it_is_here(hub: str, tmp_path: Path) -> None:
    done = pull(hub, tmp_path, "org/model")
    assert done.returncode == 0, done.stderr
    directory = Path(done.stdout.strip())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
    size = sum(map(len, FILES.values())) / 1e9
    assert f"supported; {size:.2f} GB, {size:.2f} GB to download" in done.stderr
    assert directory_of(str(directory)) == directory
    again = pull(hub, tmp_path, "org/model")
    assert (again.stdout, "all of it is here" in again.stderr) == (done.stdout, True)


DISK = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 9, 9)"
FAULTS = [
    ("org/other", "", "model_type"),
    ("org/gguf", "", "has no config.json; a GGUF file is named by its quantization, org/gguf:Q4_K_M"),
    ("org/gguf:Q4_K_M", "", "has no GGUF file of Q4_K_M; it has no GGUF file that names its quantization"),
    ("org/quantized:Q4_0", "", "has no GGUF file of Q4_0; it has IQ3_XXS, Q4_K_M, Q8_0, UD-Q4_K_XL"),
    ("org/quantized:Q8_0", "", SPLIT),
    ("org/none:Q4_K_M", "", "there is none of this name and revision"),
    ("org/none", "", "there is none of this name and revision"),
    ("org/gated", "", "its terms must be accepted on its page first"),
    ("org/private", "", "there is none of this name, or it needs a token (HF_TOKEN)"),
    ("org/model", DISK, "0.00 GB free"),
    ("phase0_request/tiny_chat", "", "is here already"),
    ("x" * 300, "", "neither a directory nor the name of a repository"),
    ("", "", "an empty name is neither a directory nor the name of a repository"),
    ("a b", "", "neither a directory nor the name of a repository"),
]


@pytest.mark.parametrize(("name", "code", "words"), FAULTS)
def test_why_a_model_cannot_be_had_is_said_before_its_weights_are_downloaded(
    name: str, code: str, words: str, hub: str, tmp_path: Path
) -> None:
    Hub.asked.clear()
    done = pull(hub, tmp_path, name, code=code)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "model.safetensors" not in Hub.asked or code


@pytest.mark.parametrize("name", ["org/quantized:Q4_K_M", "hf.co/org/quantized:q4_k_m"])
def test_a_quantization_names_one_file_of_a_repository(name: str, hub: str, tmp_path: Path) -> None:
    done = pull(hub, tmp_path, name)
    assert (done.returncode, Path(done.stdout.strip()).name) == (0, "model-Q4_K_M.gguf"), done.stderr
    assert [file.name for file in tmp_path.rglob("*.gguf")] == ["model-Q4_K_M.gguf"]
    assert f"{name}: llama, supported" in done.stderr
    again = pull("http://127.0.0.1:9", tmp_path, name, offline="1")
    assert again.stdout == done.stdout


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_model_that_is_here_needs_no_hub_and_a_part_of_one_does(offline: str, hub: str, tmp_path: Path) -> None:
    nowhere, first = "http://127.0.0.1:9", pull(hub, tmp_path, "org/model")
    again = pull(nowhere, tmp_path, "org/model", offline=offline)
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert "all of it is here, and the hub cannot be asked" in again.stderr
    (Path(first.stdout.strip()) / "model.safetensors").unlink()
    part = pull(nowhere, tmp_path, "org/model", offline=offline)
    assert (part.returncode, part.stdout) == (1, "")
    assert "it cannot be reached" in part.stderr


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    done = pull("http://127.0.0.1:9", tmp_path, "org/model")
    assert done.returncode == 1
    assert "it cannot be reached" in done.stderr
