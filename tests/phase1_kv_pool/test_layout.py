import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase1_kv_pool import KVLayout
from phase1_kv_pool.lab.model_layout import layout_of

GIB = 1 << 30
LLAMA_8B = KVLayout(layers=32, kv_heads=8, head_dim=128)
LLAMA_70B = KVLayout(layers=80, kv_heads=8, head_dim=128)
MHA_8192 = KVLayout(layers=32, kv_heads=128, head_dim=64)  # 8,192 wide, 128 heads, one KV head for each
GQA_8192 = KVLayout(layers=32, kv_heads=8, head_dim=64)


@pytest.mark.proof
def test_bytes_per_token_of_common_models() -> None:
    found = LLAMA_8B.bytes_per_token
    assert found == 128 * 1024, f"a token of Llama-3.1-8B takes 128 KiB, not {found / 1024:g} KiB"
    context = LLAMA_70B.bytes_per_token * 32_768
    assert context == 10 * GIB, f"32K tokens of Llama-3.1-70B take 10 GiB, not {context / GIB:g}"
    for layout, wanted in ((LLAMA_70B, 320), (MHA_8192, 1024), (GQA_8192, 64)):
        assert layout.bytes_per_token == wanted * 1024, f"{layout}: {layout.bytes_per_token / 1024:g} KiB, not {wanted}"
    found, wanted = replace(LLAMA_8B, dtype="int8").bytes_per_token, 2 * 32 * 8 * (128 + 4)
    assert found == wanted, f"in int8, with a scale of four bytes a head, a token takes {wanted} bytes, not {found}"


@given(st.integers(1, 64), st.integers(-(10**6), 10**9), st.integers(1, 5000))
def test_counts_are_of_whole_pages(page_size: int, memory: int, tokens: int) -> None:
    layout = KVLayout(2, 2, 8, page_size)
    pages = layout.pages_in(memory)
    page, each = layout.bytes_per_page, layout.pages_for(tokens)
    assert pages * page <= max(memory, 0) < (pages + 1) * page, f"{pages} pages of {page} bytes in {memory} bytes"
    held = layout.tokens_in(memory), layout.pages_for(0)
    assert held == (pages * page_size, 0), f"{pages} pages of {page_size}: tokens_in and pages_for(0) are {held}"
    assert (each - 1) * page_size < tokens <= each * page_size, f"{tokens} tokens in {each} pages of {page_size}"
    fit = layout.requests_in(memory, tokens)
    assert fit * each <= pages < (fit + 1) * each, f"{fit} requests of {each} pages in {pages} pages"


CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim"),
    [
        (CONFIG, 32, 128),  # no num_key_value_heads: multi-head attention
        (CONFIG | {"num_key_value_heads": 8}, 8, 128),
        (CONFIG | {"num_key_value_heads": 8, "head_dim": 64}, 8, 64),  # an explicit head_dim, as in Qwen3
        (CONFIG | {"num_key_value_heads": None, "head_dim": None}, 32, 128),
        ({"text_config": CONFIG | {"num_key_value_heads": 8}, "hidden_size": 1}, 8, 128),
    ],
)
def test_layout_from_a_model_configuration(
    config: dict[str, int], kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    expected = KVLayout(32, kv_heads, head_dim, page_size=64, dtype="float16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path, str(tmp_path / "config.json")):
        assert layout_of(source, page_size=64, dtype="float16") == expected


def test_wrong_values_are_refused_with_the_field_name(tmp_path: Path) -> None:
    for field, value in (("layers", 0), ("kv_heads", -1), ("head_dim", 1.5), ("page_size", 0), ("layers", True)):
        with pytest.raises(ValueError, match=f"{field} must be an integer from 1, got "):
            KVLayout(**({"layers": 1, "kv_heads": 1, "head_dim": 8} | {field: value}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, int8, fp8, got 'int4'"):
        KVLayout(1, 1, 8, dtype="int4")
    for missing in CONFIG:
        with pytest.raises(ValueError, match=f"{missing} must be an integer from 1, got None"):
            layout_of({name: value for name, value in CONFIG.items() if name != missing})
    with pytest.raises(ValueError, match="hidden_size 10 is no multiple of 3 heads"):
        layout_of(CONFIG | {"hidden_size": 10, "num_attention_heads": 3})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        layout_of(tmp_path)
    with pytest.raises(ValueError, match="latent vector"):
        layout_of(CONFIG | {"kv_lora_rank": 512})
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        LLAMA_8B.requests_in(GIB, 0)
