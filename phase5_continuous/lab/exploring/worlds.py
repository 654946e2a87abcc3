"""Worlds by name, the largest last, and for each planted bug one in which it shows."""

from phase5_continuous.lab.exploring.setting import Setting, kinds

SHARED = "aab", "aac", "zzz"
FOUR = "aab", "aac", "aab", "zzz"
TWO = "x", "x", "y", "y"
WORLDS = {
    "smallest": Setting(kinds=kinds(["aa", "zz"]), pages=3, lost=0),
    "small": Setting(kinds=kinds(SHARED), ends=("abort", "stop", "timeout")),
    "ahead": Setting(kinds=kinds(SHARED), ahead=1, ends=("abort", "stop")),
    "failures": Setting(kinds=kinds(["aab", "aac"], 3), ahead=1, also=("fail", "again")),
    "duplicates": Setting(kinds=kinds(["aab", "aab", "zz"], 4), also=("reset",)),
    "drafts": Setting(kinds=kinds(SHARED, 3), drafts=2),
    "late": Setting(kinds=kinds(["aab", "zz"], 3), pages=3, ahead=1, also=("late",)),
    "full": Setting(kinds=kinds(SHARED), limit=1),
    "watermark": Setting(kinds=kinds(["aa", "zz", "ab"]), watermark=0.25),
    "priorities": Setting(kinds=kinds(SHARED, 2, priorities=[1, 0, 0]), policy="priority", places=2),
    "long": Setting(kinds=kinds(["aab", "aacdefg", "z"]), pages=5, chunk=3),
    "outgrown": Setting(kinds=kinds(["aab", "z"], 4), pages=2),
    "tight": Setting(kinds=kinds(["a", "b", "cc"], 4), shares=False, budget=2, chunk=2, lost=0, ends=()),
    "tenants": Setting(kinds=kinds(SHARED, tenants=["x", "y", "y"]), fair=True, lost=0),
    "places": Setting(kinds=kinds(["aa", "ab", "zz"], 3, ["x", "x", "y"]), places=2, fair=True, lost=0),
    "four": Setting(kinds=kinds(FOUR, 2, TWO), pages=6, fair=True, lost=0),
    "standard": Setting(kinds=kinds(FOUR, 3, TWO), pages=6, ahead=1, fair=True, lost=0),
}
BUGS = {
    "1a": Setting(kinds=kinds(["aab"], 4)),
    "3a": Setting(kinds=kinds(["a", "b", "ccc"], 3), pages=8, budget=2, chunk=2),
    "3b": Setting(kinds=kinds(["abcdefg", "zz"]), pages=6),
    "3c": Setting(kinds=kinds(["a", "b", "c"], 4), pages=8, budget=2, chunk=2),
    "4a": Setting(kinds=kinds(["aab"])),
    "4b": Setting(kinds=kinds(["abcdefg"])),
    "4c": Setting(kinds=kinds(["aabb", "aabb"])),
    "4d": Setting(kinds=kinds(["aab"], salts=["s"])),
    "4f": Setting(kinds=kinds(["aab", "aab", "zz"], 1), lost=0, ends=()),
    "5a": Setting(kinds=kinds(SHARED)),
    "5b": Setting(kinds=kinds(["aab"], 3), ahead=1),
    "5c": Setting(kinds=kinds(["aa", "zz"]), pages=4, watermark=0.5),
    "5d": Setting(kinds=kinds(SHARED)),
    "5e": Setting(kinds=kinds(["aab", "aac"])),
    "5f": Setting(kinds=kinds(["aab", "aac"])),
    "5g": Setting(kinds=kinds(["aab", "aab", "zz"], 4)),
}
