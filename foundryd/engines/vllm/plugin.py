# SPDX-License-Identifier: Apache-2.0
"""The plug-in that each process of vLLM loads (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import logging
import os

from foundryd._native import _hook
from foundryd.engines.vllm import versions
from foundryd.errors import FoundrydError
from foundryd.logs import set_up_rank
from foundryd.settings import Mode, Settings, settings

log = logging.getLogger("foundryd.vllm")

_VARIABLES = ("FOUNDRYD_MODE", "FOUNDRYD_STARTUP_REPORT")


def register() -> None:
    """Puts the seams into vLLM's workers if the environment asks for it; vLLM may call this more than once.

    Whatever is wrong ends a capture, and lets vLLM go on as if foundryd were not installed otherwise.
    """
    if not any(os.environ.get(name) for name in _VARIABLES):
        return
    try:
        config = settings()
        set_up_rank(config.log_format, config.log)
        versions.seams_of(versions.installed()).install()
        if config.mode is Mode.RESTORE:
            prepare_children(config)
    except FoundrydError as error:
        if os.environ.get("FOUNDRYD_MODE") == Mode.CAPTURE.value:
            raise
        log.warning("vLLM starts as if foundryd were not installed (%s): %s", error.reason, error)


def prepare_children(config: Settings) -> None:
    """Lets the processes that this one starts have the hook, if this one was started without.

    ``vllm serve`` starts its engine as a new program, so the variables of a restore are all that a user has to set.
    """
    from foundryd.cli.environment import restore_environment

    if not _hook.available():
        os.environ |= restore_environment(
            os.environ, archive=config.archive, group=config.group, variant=config.variant
        )
