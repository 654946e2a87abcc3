from phase4_radix.prefix_cache import Counts as Counts
from phase4_radix.prefix_cache import PrefixCache as PrefixCache
from phase4_radix.radix_tree import Match as Match
from phase4_radix.radix_tree import RadixTree as RadixTree
