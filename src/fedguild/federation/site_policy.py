"""The limits that a site sets for the server, checked before anything is trained or sent."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class SitePolicy:
    """A site's limits: the settings of `accept:` in its `site.yaml`.

    Attributes:
        methods: Names of the methods that may run; None for any.
        max_steps: Maximum number of optimizer steps in a round; None for no limit.
        leave: Patterns of the names of tensors that may leave the site.
        min_clients: Minimum number of clients whose uploads the run aggregates.
        max_upload_bytes: Largest encoded upload; None for no limit.
    """

    methods: Collection[str] | None = None
    max_steps: int | None = None
    leave: tuple[str, ...] = ("*",)
    min_clients: int = 2
    max_upload_bytes: int | None = None

    def run_refusal(self, method: str, steps: int, aggregated: int) -> str:
        """Returns why a run is refused; empty if it is not.

        Args:
            method: Name of its method.
            steps: Optimizer steps of a round on this site.
            aggregated: Minimum number of clients whose uploads it aggregates.
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

    def names_refusal(self, names: Iterable[str]) -> str:
        """Returns why tensors of these names may not leave; empty if they may."""
        refused = sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.leave))
        if not refused:
            return ""
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        return f"the tensor '{refused[0]}'{more} may not leave: accept.leave is {', '.join(self.leave) or 'empty'}"

    def size_refusal(self, size_bytes: int) -> str:
        """Returns why an upload of this size may not leave; empty if it may."""
        if self.max_upload_bytes is not None and size_bytes > self.max_upload_bytes:
            return f"the upload has {size_bytes} bytes, beyond accept.max_upload_bytes of {self.max_upload_bytes}"
        return ""
