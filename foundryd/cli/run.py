# SPDX-License-Identifier: Apache-2.0
"""``foundryd run``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from foundryd.errors import UsageError

OPTIONS = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def run(
    command: Annotated[list[str], typer.Argument(help="The engine's own command, after --.")],
    archive: Annotated[
        str, typer.Option(help="A name that the daemon knows, or a file: then no daemon is needed.")
    ] = "",
    group: Annotated[str, typer.Option(help="The replica that this engine belongs to.")] = "default",
    variant: Annotated[str, typer.Option(help="Parallel configuration; the archive's only one if left out.")] = "",
    driver: Annotated[str, typer.Option(help="auto, cuda, or soft for the software driver.")] = "auto",
) -> None:
    """Run an engine that restores its graphs; the engine itself starts its ranks as it always does."""
    from foundryd.cli.environment import driver_environment, restore_environment

    env = dict(os.environ)
    env |= driver_environment(driver, env)
    env |= restore_environment(env, archive=archive, group=group, variant=variant)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise UsageError(
            f"{command[0]} cannot be run ({error.strerror}): give the engine's command after --"
        ) from error
