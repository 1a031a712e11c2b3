# SPDX-License-Identifier: Apache-2.0
"""What takes too long for `make test`: every release, and upstream's judgement."""
