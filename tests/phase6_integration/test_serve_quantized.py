"""Quantized models behind HTTP: a GGUF file with its own tokenizer, and a checkpoint of compressed-tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase6_integration.engine.engine import NanoServingEngine
from tests.gguf_files import saved_gguf
from tests.phase2_prefill_decode.quantized import checkpoints as made
from tests.phase6_integration.life import PATIENCE, life

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0}


def answer(*arguments: str) -> tuple[str, dict[str, Any]]:
    """What a server with these flags answers, and what it has logged when it was ready."""
    with life("--log-format", "json", *arguments) as server:
        url = server.listening()
        ready = json.loads(server.until(r'.*"message": "ready".*')[0])
        assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == [Path(arguments[0]).stem]
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 24}, timeout=PATIENCE)
        return str(response.json()["choices"][0]["message"]["content"]), ready


def test_a_gguf_file_answers_as_the_directory_that_it_was_made_of(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.bfloat16)
    saved_gguf(model, tmp_path / "chat.gguf", lambda name: "BF16", tokenizer=True)
    text, _ = answer(str(tmp_path / "chat.gguf"))
    prompt = Tokenizer.from_pretrained().chat(CHAT["messages"])
    with NanoServingEngine.from_pretrained(kv_cache_pages=16) as engine:
        [wanted] = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    assert text == wanted.text


def test_a_quantized_checkpoint_answers_as_its_dequantized_weights(tmp_path: Path) -> None:
    before, after = tmp_path / "int8", tmp_path / "dequantized"
    for directory in (before, after):
        shutil.copytree(BUNDLED, directory)
    make, tensors = made.compressed("int8"), load_file(BUNDLED / "model.safetensors")
    quantized: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if made.is_quantized(name):
            parts, tensors[name] = make(weight)
            quantized |= {name.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
        else:
            quantized[name] = weight
    save_file(quantized, before / "model.safetensors")
    save_file(tensors, after / "model.safetensors")
    config = json.loads((BUNDLED / "config.json").read_text())
    written = config | {"quantization_config": made.compressed_config("int8")}
    (before / "config.json").write_text(json.dumps(written))
    text, ready = answer(str(before))
    wanted, plain = answer(str(after))
    assert text == wanted
    assert ready["linear"] == plain["linear"].replace("bfloat16", "int8", 1), "it stays quantized"
