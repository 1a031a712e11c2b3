# SPDX-License-Identifier: Apache-2.0
"""The error that a command says in one line."""


class BuildError(Exception):
    """What the user has to know, in one line: thing, value, what is accepted."""
