"""Base class of all config sections: frozen, and closed to unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Of names that are folders, too: letters, digits, dot, dash and underscore."""


class Section(BaseModel):
    """A group of settings; each field carries its help text, range and default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, str_strip_whitespace=True)
