# SPDX-License-Identifier: Apache-2.0
"""One engine, one process: measure in a forked child."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def send(measure: Callable[..., Any], arguments: Any, out: Connection) -> None:
    out.send(measure(**arguments))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def in_child(measure: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a function returns in a forked child.

    Raises:
        RuntimeError: The child ended without a result.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(measure, arguments, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"{measure.__name__}({arguments}) ended with status {child.exitcode}"
        ) from None
    finally:
        child.join()
