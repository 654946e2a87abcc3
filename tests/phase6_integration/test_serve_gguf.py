"""A GGUF file behind HTTP, with its own tokenizer and chat template."""

import json
import signal
from pathlib import Path

import httpx2
import torch
from transformers import AutoModelForCausalLM

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import BUNDLED, Tokenizer
from phase2_prefill_decode.extras.cpu.backend import packed_linear
from phase6_integration.engine.engine import NanoServingEngine
from tests.gguf_files import saved_gguf
from tests.phase6_integration.life import PATIENCE, gone, life, stream

CHAT = [{"role": "user", "content": "What is a KV cache?"}]


def test_a_gguf_file_answers_as_the_directory_that_it_was_made_of(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.bfloat16)
    saved_gguf(model, tmp_path / "chat.gguf", lambda name: "BF16", tokenizer=True)
    with life(str(tmp_path / "chat.gguf"), "--shutdown-timeout", "0.1", "--log-format", "json") as server:
        url = server.listening()
        ready = json.loads(server.until(r'.*"message": "ready".*')[0])
        assert ready["dtype"] == "bfloat16"
        assert ready["linear"] == packed_linear(torch.ones(16, 16, dtype=torch.bfloat16)).kernel
        assert [served["id"] for served in httpx2.get(f"{url}/v1/models").json()["data"]] == ["chat"]
        body = {"messages": CHAT, "temperature": 0, "max_tokens": 24}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
        (engine,) = server.engines()
        with httpx2.Client(timeout=PATIENCE) as http:
            events = stream(http, url, max_tokens=1900, ignore_eos=True)
            next(events)
            server.signal(signal.SIGTERM)
            assert [*events][-1] == "[DONE]"
        assert server.ended() == 0
    assert gone(engine), "a signal ends it in order while it answers"
    with NanoServingEngine.from_pretrained(kv_cache_pages=64) as engine:
        params = SamplingParams(temperature=0, max_tokens=24)
        (wanted,) = engine.generate([Tokenizer.from_pretrained().chat(CHAT)], params, progress=False)
    assert answer["choices"][0]["message"]["content"] == wanted.text
