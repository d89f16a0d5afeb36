"""Word lists of the task families: short, common and few."""

from __future__ import annotations

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": ("cat", "dog", "cow", "pig", "hen", "fox", "bear", "wolf", "goat", "duck", "lion", "frog"),
    "color": ("red", "blue", "green", "gold", "pink", "gray", "black", "white", "brown", "tan", "teal", "navy"),
    "food": ("rice", "soup", "cake", "corn", "egg", "ham", "pie", "bean", "milk", "bread", "plum", "nut"),
    "tool": ("saw", "axe", "drill", "rake", "nail", "rope", "pen", "file", "lamp", "broom", "clock", "key"),
}

_LUMO = (
    *("zub", "kep", "mol", "tiv", "gax", "wum", "fip", "jod", "ruz", "bex", "lun", "vok"),
    *("dap", "niz", "hud", "sov", "yek", "pum", "qib", "cax", "ozo", "uvi", "eku", "iba"),
)
DICTIONARY: dict[str, str] = dict(zip((*CATEGORIES["animal"], *CATEGORIES["food"]), _LUMO, strict=True))
"""English word -> word of the invented language Lumo."""

PLACES = ("room", "food", "film", "book", "song", "trip", "game", "shop", "class", "show", "staff", "view")
POSITIVE = ("great", "lovely", "superb", "pleasant", "fine", "perfect", "fun", "brilliant", "sweet", "smart")
NEGATIVE = ("awful", "dull", "poor", "horrid", "ugly", "boring", "rude", "weak", "nasty", "sad")
DEGREES = ("", " very", " really", " quite", " so", " rather")
SPEAKERS = ("", " we say", " i think", " they told us", " people say")
