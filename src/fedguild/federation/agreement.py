"""What a site lets the server ask for: its prior agreement, checked before anything is trained or sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Agreement:
    """The limits of a site; the settings of `accept:` in its file.

    Attributes:
        methods: Names of the methods that may run; None for any.
        max_steps: Most optimizer steps in a round; None for no limit.
        leave: Patterns of the names of tensors that may leave.
        min_clients: Fewest clients that the run aggregates at once.
        max_upload_bytes: Largest encoded upload; None for no limit.
    """

    methods: Collection[str] | None = None
    max_steps: int | None = None
    leave: tuple[str, ...] = ("*",)
    min_clients: int = 2
    max_upload_bytes: int | None = None

    def refuses_run(self, method: str, steps: int, aggregated: int) -> str:
        """Returns why a run is refused; empty where it is not.

        Args:
            method: Its method.
            steps: The optimizer steps that it asks of this site in a round.
            aggregated: The fewest clients whose uploads it aggregates.
        """
        if self.methods is not None and method not in self.methods:
            return f"the method '{method}' is not among accept.methods ({', '.join(self.methods) or 'none'})"
        if self.max_steps is not None and steps > self.max_steps:
            return f"a round asks for {steps} steps, beyond accept.max_steps of {self.max_steps}"
        if aggregated < self.min_clients:
            return (
                f"the run may aggregate the uploads of only {aggregated} client(s), below accept.min_clients of "
                f"{self.min_clients}"
            )
        return ""

    def refuses_names(self, names: Iterable[str]) -> str:
        """Returns why tensors of these names may not leave; empty where they may."""
        kept = sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.leave))
        if not kept:
            return ""
        more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
        return f"the tensor '{kept[0]}'{more} may not leave: accept.leave is {', '.join(self.leave) or 'empty'}"

    def refuses_size(self, size_bytes: int) -> str:
        """Returns why an upload of this size may not leave; empty where it may."""
        if self.max_upload_bytes is not None and size_bytes > self.max_upload_bytes:
            return f"the upload has {size_bytes} bytes, beyond accept.max_upload_bytes of {self.max_upload_bytes}"
        return ""
