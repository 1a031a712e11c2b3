# SPDX-License-Identifier: Apache-2.0
"""The commands of `python -m cpu_wheel`, each a module with its arguments and its run.

Only the module of the command that is given is imported.
"""
