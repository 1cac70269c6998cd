"""Keys of foreach items as Dagster's mapping keys, which are of `[A-Za-z0-9_]` alone, and back."""

from __future__ import annotations

import re
from typing import Final

NO_ITEM: Final = "none_"
"""The mapping key that stands for an empty list: without one, Dagster would not run what collects the items. No item
has it: in the mapping key of an item, underscores come in pairs."""

_SAFE: Final = re.compile(r"[A-Za-z0-9]")
_ESCAPED: Final = re.compile(r"_([0-9a-f]*)_")


def mapping_key(item_key: str) -> str:
    """The mapping key of an item: letters and digits stay, any other character is `_<code point in hex>_`.

    Two items never get the same one. The empty key is `__`.
    """
    return "".join(c if _SAFE.match(c) else f"_{ord(c):x}_" for c in item_key) or "__"


def item_key(mapping_key: str) -> str:
    """The item's key: the inverse of `mapping_key`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else "", mapping_key)
