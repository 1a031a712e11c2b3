# SPDX-License-Identifier: Apache-2.0
ImageReadMode = decode_image = None
