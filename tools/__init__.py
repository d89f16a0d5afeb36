"""Tools of this repository alone: they are in no wheel, and run from its root as `python -m tools.NAME`.

`generate`, `website` and `notebooks` make the documentation; `records` runs the papers' tables and writes their pages;
`tiny` and `english` train the packaged models, `smollm2` makes a mixture of experts from SmolLM2.
"""
