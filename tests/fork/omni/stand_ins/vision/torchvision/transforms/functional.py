# SPDX-License-Identifier: Apache-2.0
pil_to_tensor = None
