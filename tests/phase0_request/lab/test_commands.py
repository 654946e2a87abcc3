"""`python -m phaseN_x.lab`: which modules it lists, and that it runs each by its name."""

import pytest

from phase0_request.lab.commands import contents, main

LABS = [
    f"{phase}.lab"
    for phase in (
        "phase0_request",
        "phase1_kv_pool",
        "phase2_prefill_decode",
        "phase3_chunked_prefill",
        "phase4_radix",
        "phase5_continuous",
        "phase6_integration",
    )
]


@pytest.mark.parametrize("lab", LABS)
def test_every_listed_module_runs_by_its_name(lab: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = contents(lab)
    assert "demo" in listed
    for name, about in listed.items():
        assert about
        with pytest.raises(SystemExit, match=r"^0$"):
            main(lab, [name, "--help"])
        command = f"python -m {lab.partition('.')[0]}" if name == "demo" else f"python -m {lab} {name}"
        assert capsys.readouterr().out.startswith(f"usage: {command} ")


def test_without_a_name_the_modules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("phase0_request.lab", []) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:]] == list(contents("phase0_request.lab"))


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main("phase0_request.lab", ["bnech"])
    assert "there is no 'bnech' here; it has bench, demo" in capsys.readouterr().err
