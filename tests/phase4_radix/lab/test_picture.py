import random

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.charts import STYLE
from phase4_radix.lab.picture import KEPT, LOCKED, Block, blocks, fit, picture
from phase4_radix.radix_tree import RadixTree


def grown(prompts: int, seed: int = 0) -> RadixTree:
    """A tree of short prompts over three tokens, pages of one: it parts everywhere."""
    tree, rng, page = RadixTree(1), random.Random(seed), 0
    for _ in range(prompts):
        tokens = rng.choices(range(3), k=rng.randint(1, 7))
        tree.insert(tokens, range(page, page + len(tokens)))
        page += len(tokens)
    return tree


def test_every_page_has_a_place_of_its_own_behind_those_before_it() -> None:
    """Against the tree's own paths, and against a grid in which nothing may lie upon anything else."""
    tree = grown(40)
    laid = {block.branch.node: block for block in blocks(tree.branches())}
    assert len(laid) == len(tree) > 20
    taken: set[tuple[int, int]] = set()
    leaves = 0
    for number, block in laid.items():
        *above, own = tree.path(number)
        assert own == number
        assert block.start == sum(len(laid[node].branch.pages) for node in above)
        below = [other for other in laid.values() if tree.path(other.branch.node)[:-1] == tree.path(number)]
        leaves += not below
        assert block.rows == (sum(other.rows for other in below) or 1)
        for other in below:
            assert block.row <= other.row < other.row + other.rows <= block.row + block.rows
        area = {(block.start + x, block.row + y) for x in range(len(block.branch.pages)) for y in range(block.rows)}
        assert not area & taken
        taken |= area
    assert {row for _, row in taken} == set(range(leaves))


def test_an_empty_tree_is_an_empty_picture() -> None:
    assert blocks(RadixTree(4).branches()) == []
    axes = Figure().subplots()
    picture(axes, [], str)
    assert list(axes.patches) == []


def test_words_end_within_their_block() -> None:
    tree = RadixTree(1)
    for number, tokens in enumerate(([*range(10)], [0, *range(11, 16)], [90])):
        tree.insert(tokens, range(10 * number, 10 * number + len(tokens)))
    with matplotlib.rc_context(STYLE):
        axes = Figure(figsize=(6, 2), layout="constrained").subplots()
        picture(axes, tree.branches(), lambda branch: "many words and all of them long " * len(branch.pages))
        axes.figure.draw_without_rendering()
    areas = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    texts = [text for text in axes.texts if text.get_text().startswith("m")]
    assert len(areas) == len(tree) == len(texts) == 4
    for area, text in zip(areas, texts, strict=True):
        inside, outside = text.get_window_extent(), area.get_window_extent()
        assert outside.x0 < inside.x0 < inside.x1 <= outside.x1
        assert text.get_text().endswith("\u2026")
        assert inside.width > 0.5 * outside.width  # no more is cut than must be


def test_nothing_is_written_where_nothing_has_room() -> None:
    axes = Figure().subplots()
    for words, room, left in (("words", 1000, "words"), ("words", 0, ""), ("", 0, ""), ("words", 1e-9, "")):
        written = axes.text(0, 0, words)
        fit(written, room)
        assert written.get_text() == left


def test_a_picture_shows_every_node_with_its_words_and_locks() -> None:
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
    node = tree.insert([1, 2, 7, 8], [3, 4]).node
    tree.lock(node)
    with matplotlib.rc_context(STYLE):
        axes = Figure(figsize=(6, 2), layout="constrained").subplots()
        picture(axes, tree.branches(), lambda branch: f"tokens {branch.tokens}")
        axes.figure.draw_without_rendering()
    areas = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [(*area.get_xy(), area.get_width(), area.get_height()) for area in areas] == [
        (0, 0, 1, 2), (1, 0, 2, 1), (1, 1, 1, 1),
    ]  # fmt: skip
    colors = [matplotlib.colors.to_hex(area.get_facecolor()) for area in areas]
    assert colors == [LOCKED, KEPT, LOCKED]
    said = [text.get_text() for text in axes.texts]
    assert said == [
        "tokens [1, 2]", "1 page, 1 lock", "tokens [3, 4, 5, 6]", "2 pages", "tokens [7, 8]", "1 page, 1 lock",
    ]  # fmt: skip
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 3), (2, 0))
    assert isinstance(blocks(tree.branches())[0], Block)
