"""`fedguild profile`: the costs of a config, and the papers' published figures."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

import fedguild
from fedguild.cli.options import ConfigArgument, JsonOption, OverridesArgument, config_and_settings
from fedguild.cli.output import note, show, show_json
from fedguild.core.errors import ConfigError

EXAMPLES = (
    "fedguild profile ub-smoe/olmoe-commonsense",
    "fedguild profile ub-smoe/olmoe-commonsense --wire-dtype bf16 method.send_pseudo_gradient=always",
    "fedguild profile flame/olmoe-dolly --model Qwen/Qwen3-30B-A3B --checkpointing --json",
    "fedguild profile --published",
)


def command(
    config: ConfigArgument = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="ID|PATH",
            help="Another backbone: a hub id (known ones need no download), a folder, or a config.json.",
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option("--clients", min=1, help="Number of clients.")] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            "--examples",
            min=1,
            help="Training examples of a client; by default those of local data, the config's cap, or 1000.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", min=1, help="Tokens of a sequence; by default data.max_length.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, help="Tokens of a forward pass; by default training.batch_size sequences."),
    ] = None,
    wire_dtype: Annotated[
        str | None,
        typer.Option(
            "--wire-dtype",
            metavar="fp32|bf16",
            help="Dtype that all numbers on the wire are counted in; by default as federation.wire_dtype sends them.",
        ),
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Whether activations are recomputed; by default as the config says.",
            show_default=False,
        ),
    ] = None,
    published: Annotated[
        bool,
        typer.Option("--published", help="Show the papers' figures next to ours, and the matching settings."),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a config costs its clients and its server, from the model's config and the number of examples.

    No weight is loaded and nothing is downloaded. Data that is generated or on this machine is read to count a client's
    examples, unless --examples is given.
    """
    if published:
        _show_published(as_json, markdown)
        return
    if wire_dtype not in (None, "fp32", "bf16"):
        raise ConfigError(f"--wire-dtype is '{wire_dtype}'.", "Known: fp32, bf16.")
    named, settings = config_and_settings(config, overrides)
    costs = fedguild.profile(
        named,
        *settings,
        model=model,
        clients=clients,
        examples=examples,
        tokens=tokens,
        context=context,
        wire_dtype=cast('Literal["fp32", "bf16"] | None', wire_dtype),
        checkpointing=checkpointing,
        tell=note,
    )

    from fedguild.cli.profile_tables import tables
    from fedguild.measuring.costs.rows import as_rows

    if as_json:
        show_json(as_rows(costs.profile))
        return
    show(*tables(costs.profile))
    if context is None and tokens is None:
        note(
            f"Every sequence counts as data.max_length, {costs.profile.workload.context_tokens} tokens: FLOPs and "
            "activations are upper bounds. Give your data's typical length as --context."
        )
    if costs.assumed_examples:
        note(
            "The config does not say how many examples a client has; "
            f"{costs.profile.workload.examples} are assumed (see --examples)."
        )


def _show_published(as_json: bool, markdown: bool) -> None:
    from fedguild.cli.profile_tables import published_markdown, published_tables, server_markdown
    from fedguild.measuring.costs.published import compare
    from fedguild.measuring.costs.published_claims import CLAIMS
    from fedguild.methods import METHODS, build_method

    compared, missing = [], {}
    for claim in CLAIMS:
        try:
            compared.append(compare(claim, build_method))
        except ConfigError as error:  # FDLoRA without its extra
            missing[claim.what] = error
    if as_json:
        show_json([row.record() for row in compared])
    elif markdown:
        typer.echo(published_markdown(compared))
        typer.echo(f"## The server\n\n{server_markdown({name: METHODS.load(name).facts.costs for name in METHODS})}")
    else:
        show(*published_tables(compared))
    for what, reason in missing.items():
        note(f"{what} is left out: {reason.message} {reason.hint}")
