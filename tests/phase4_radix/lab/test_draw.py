"""The tree drawn in the terminal."""

from rich.console import Console

from phase4_radix.lab.draw import draw
from phase4_radix.radix_tree import RadixTree


def test_every_node_is_a_line(tree: RadixTree) -> None:
    tree.insert(list(range(100, 140)), list(range(40, 60)), "tenant")
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(draw(tree))
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "24 pages in 4 nodes, 3 locked",
        "├── 1 2 3 4  pages 10-11  1 lock",
        "│   ├── 5 6  page 12",
        "│   └── 7 8  page 22  1 lock",
        "└── tenant: 100 101 102 103 104 105 … 134 135 136 137 138 139  pages 40-59",
    ]
