"""The kernels in Triton generate what plain torch does."""

import pytest

from chapters.interpreted import main


def test_the_bundled_model_says_the_same_through_triton_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max-tokens", "3"]) == 0
    triton, torch, verdict = capsys.readouterr().out.splitlines()
    assert triton.removeprefix("Triton: ").startswith(torch.removeprefix("torch:  "))
    assert verdict == "The same 3 tokens."
