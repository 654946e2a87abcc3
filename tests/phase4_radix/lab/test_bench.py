"""The benchmark: what it times, and what it records."""

from phase4_radix.lab import bench


def test_half_of_each_prompt_is_cached() -> None:
    """Half of a prompt is cached when it is first matched, and all of it the second time."""
    tree, prompts = bench.RadixTree(bench.PAGE), bench.Prompts()
    for _ in range(1500):
        prompts.insert(tree, prompts.one(own=4))
    known = total = 0
    for _ in range(200):
        prompt = prompts.one()
        known += len(tree.match(prompt).pages)
        total += len(prompt) // bench.PAGE
        prompts.insert(tree, prompt)
        assert len(tree.match(prompt).pages) == len(prompt) // bench.PAGE
    assert 0.48 < known / total < 0.52
    tree.check()
