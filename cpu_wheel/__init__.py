# SPDX-License-Identifier: Apache-2.0
"""Build a +cpu vLLM wheel: a pinned release, a patch series, an overlay.

fetch.py → source.py → wheel.py: each takes plain arguments and leaves a file or
a folder that the next one takes. steps.py runs them in order, doing only what is
out of date; pins.py reads upstream.toml, settings.py the environment; install.py is
pip's part. commands/ has the command line's, which setup.py and CMakeLists.txt call,
and backend.py is PEP 517's.
"""

import sys

# This file must parse on any Python 3, so that an old one gets the message.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "cpu_wheel: Python {}.{}.{} is too old: 3.11 or newer is needed, as in "
        "`make PYTHON=python3.11`".format(*sys.version_info[:3])
    )
