# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine, one process: a function that runs in a forked child."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def send(function: Callable[..., Any], arguments: Any, out: Connection) -> None:
    out.send(function(**arguments))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def in_child(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Return what a function returns in a forked child.

    Raises:
        RuntimeError: The child ended without a result.

    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(function, arguments, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"{function.__name__}({arguments}) ended with status {child.exitcode}"
        ) from None
    finally:
        child.join()
