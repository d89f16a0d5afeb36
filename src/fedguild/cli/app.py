"""The `fedguild` command: its sub-commands, and the handling of errors."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from click import NoSuchOption
from typer.core import TyperGroup

import fedguild
from fedguild.cli import (
    compare,
    data,
    doctor,
    evaluate,
    export,
    federation,
    generate,
    init,
    methods,
    partition,
    premise,
    presets,
    profile,
    push,
    report,
    resume,
    run,
    sweep,
    trust,
    watch,
)
from fedguild.cli.example_command import ExampleCommand
from fedguild.cli.output import explain
from fedguild.config.renamed import OPTIONS
from fedguild.core.errors import (
    INTERRUPTED,
    USER_ERROR,
    ConfigError,
    DivergedError,
    FedGuildError,
    first_line,
    is_out_of_memory,
    nearest,
)

DIVERGED = 3


@dataclass
class Invocation:
    """One invocation of the command: its global options, and how to resume it."""

    debug: bool = False
    resume_with: str = ""


class _ReportingGroup(TyperGroup):
    """Turns errors that the user can fix, and Ctrl-C, into a message and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise ConfigError(f"There is no command '{args[0]}'.", nearest(args[0], self.list_commands(ctx)))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedGuildError as error:
            if ctx.obj and ctx.obj.debug:
                traceback.print_exception(error)
            explain(f"Error: {error.message}", error.hint)
            raise typer.Exit(DIVERGED if isinstance(error, DivergedError) else USER_ERROR) from error
        except NoSuchOption as error:
            if error.option_name in OPTIONS:
                explain(f"Error: {error.option_name} is now called {OPTIONS[error.option_name]}.")
                raise typer.Exit(USER_ERROR) from error
            raise
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or (ctx.obj and ctx.obj.debug):
                raise
            resume_with = ctx.obj.resume_with if ctx.obj else ""
            explain(
                f"Error: out of memory: {first_line(error)}",
                "Set a smaller training.batch_size, data.max_length or federation.cohort_size, or model.dtype=bfloat16."
                + (f" What is complete is kept; continue with: {resume_with}" if resume_with else ""),
            )
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as error:
            resume_with = ctx.obj.resume_with if ctx.obj else ""
            explain("Interrupted.", f"Continue from the last complete round with: {resume_with}" if resume_with else "")
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    name="fedguild",
    cls=_ReportingGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedguild {fedguild.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Fine-tune one mixture-of-experts language model across clients with unequal budgets.

    Try it offline on two CPU cores: fedguild run flame/tiny-tasks
    """
    context.obj = Invocation(debug=debug)
    if not debug:
        warnings.simplefilter("ignore", FutureWarning)


for module in (
    init,
    run,
    resume,
    compare,
    sweep,
    data,
    partition,
    profile,
    premise,
    evaluate,
    generate,
    export,
    push,
    report,
    watch,
    methods,
    presets,
    trust,
    doctor,
):
    name = module.__name__.rsplit(".", 1)[-1]
    settings = getattr(module, "CONTEXT", None)
    app.command(name, cls=ExampleCommand, epilog="\n".join(module.EXAMPLES), context_settings=settings)(module.command)


app.add_typer(federation.app)


def main() -> None:
    app()
