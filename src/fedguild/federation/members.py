"""The clients admitted to a run, and their weights, which the operator controls.

A client's weight in an average is its number of training examples, which only the client knows. Its claim is capped, or
replaced by the size that the operator agreed on with it. The weight is fixed when the client is admitted, or once three
are: later claims are reported and change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fedguild.core.files import write_json
from fedguild.core.layout import client_name
from fedguild.federation.flower.client_registry import RegisteredClient
from fedguild.federation.site import ServerSettings

FEWEST_COMPARED = 3
"""With fewer clients a median of their sizes says nothing about one of them."""
EXAMPLES, CLAIMED = "examples", "claimed"
"""Keys of a member's weight in its description, and of the size that it claimed when it was admitted."""


@dataclass
class Members:
    """The members of a run, on disk.

    Attributes:
        path: The file, JSON: client index -> its description, its node, and `examples`, its weight.
        settings: The server's settings, of which `sizes`, `max_examples` and `examples_factor` are used.
        echo: Prints a line for the operator.
        audit: Receives an event and its values for the audit log.
        refuse: Called with a client that cannot take part and why; None if weights are no reason. In a secure run
            clients weight their uploads themselves, so a weight other than a client's own would end the round.
        described: Client index -> its entry in the file.
    """

    path: Path
    settings: ServerSettings
    echo: Callable[[str], None] = lambda line: None
    audit: Callable[..., None] = lambda event, **values: None
    refuse: Callable[[int, str], None] | None = None
    described: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.is_file():
            self.described = {int(index): each for index, each in json.loads(self.path.read_text("utf-8")).items()}
            for each in self.described.values():
                each.setdefault(EXAMPLES, each["sizes"]["train"])
                each.setdefault(CLAIMED, each["sizes"]["train"])

    def admit(self, clients: Mapping[int, RegisteredClient]) -> list[int]:
        """Admits new clients, and reports those whose claims have changed.

        In a secure run only clients whose weight equals their current claim are admitted or stay.

        Returns:
            The indices of the new members.
        """
        new = [index for index in sorted(clients) if index not in self.described]
        sizes = {index: client.description["sizes"]["train"] for index, client in clients.items()}
        known = {index: each["sizes"]["train"] for index, each in self.described.items()}
        claimed = {index: each[CLAIMED] for index, each in self.described.items()}
        weights = admitted_sizes({**sizes, **claimed}, self._compared({**sizes, **claimed}))
        if len(self.described) < FEWEST_COMPARED:
            self._weigh_again({index: weights[index] for index in claimed})
        refused = set()
        for index, client in sorted(clients.items()):
            weight = weights[index] if index in new else self.described[index][EXAMPLES]
            if self.refuse is not None and weight != sizes[index]:
                refused.add(index)
                self.refuse(index, _another_weight(index, sizes[index], weight, member=index not in new))
            elif index in new:
                self._admit(client, weights[index])
            elif sizes[index] != known[index]:
                self.echo(
                    f"{client_name(index)} now says that it has {sizes[index]} training examples, and said "
                    f"{known[index]} before; its weight stays {self.described[index][EXAMPLES]}."
                )
                self.audit("size", client=index, said=known[index], says=sizes[index])
                self.described[index]["sizes"] = dict(client.description["sizes"])
        new = [index for index in new if index not in refused]
        if new:
            self._write()
        return new

    def _compared(self, sizes: Mapping[int, int]) -> ServerSettings:
        """Returns the settings that cap sizes; in a secure run without the cap by others until there are enough."""
        few = self.refuse is not None and len(sizes) < FEWEST_COMPARED
        return self.settings.model_copy(update={"examples_factor": None}) if few else self.settings

    def examples(self, index: int) -> int:
        """Returns a client's weight; 0 if it is not a member."""
        return int(self.described[index][EXAMPLES]) if index in self.described else 0

    def _weigh_again(self, weights: Mapping[int, int]) -> None:
        """Updates the weights of clients that joined when there were too few to compare with."""
        for index, weight in weights.items():
            before = self.described[index][EXAMPLES]
            if weight != before:
                self.described[index][EXAMPLES] = weight
                self.audit("weight", client=index, before=before, examples=weight)
                self.echo(
                    f"{client_name(index)} weighs as much as {weight} examples, and {before} before others joined."
                )

    def _admit(self, client: RegisteredClient, weight: int) -> None:
        claimed = client.description["sizes"]["train"]
        self.described[client.client] = {
            **client.description,
            "node": str(client.node),
            CLAIMED: claimed,
            EXAMPLES: weight,
        }
        self.audit("joined", client=client.client, node=str(client.node), claimed=claimed, examples=weight)
        if weight != claimed:
            self.echo(
                f"{client_name(client.client)} says that it has {claimed} training examples; it weighs as much as "
                f"{weight} (sizes, max_examples and examples_factor in server.yaml)."
            )

    def _write(self) -> None:
        write_json(self.path, {str(index): each for index, each in sorted(self.described.items())})


def _another_weight(client: int, own: int, weight: int, *, member: bool) -> str:
    """Returns why a client whose weight is not its own cannot take part in a secure run."""
    if member:
        return (
            f"it weighs itself by {own} examples now and has weighed {weight} since it joined; in a secure run "
            "(federation.secure) clients weigh themselves, so that both have to agree"
        )
    return (
        f"it would weigh itself by {own} examples, but here it counts as {weight} (sizes, max_examples and "
        "examples_factor in server.yaml); in a secure run (federation.secure) clients weigh themselves, so that both "
        f"have to agree: sizes: {{{client}: {own}}} admits it as it is"
    )


def admitted_sizes(claimed: Mapping[int, int], settings: ServerSettings) -> dict[int, int]:
    """Returns client index -> the number of examples that is its weight.

    A size that is not pinned counts up to `examples_factor` times the clients' median; with two clients, times the
    smaller one.

    Args:
        claimed: Client index -> the number of training examples that it claims.
        settings: Sizes that are pinned, and caps on the others.
    """
    sizes = {index: settings.sizes.get(index, size) for index, size in claimed.items()}
    cap = float("inf") if settings.max_examples is None else float(settings.max_examples)
    if settings.examples_factor is not None and len(sizes) > 1:
        usual = median(sizes.values()) if len(sizes) >= FEWEST_COMPARED else min(sizes.values())
        cap = min(cap, max(1.0, settings.examples_factor * usual))
    return {index: size if index in settings.sizes else int(min(size, cap)) for index, size in sizes.items()}
