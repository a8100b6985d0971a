"""Samplers, one file each, and the protocol they share.

Imported as `dlm_decode.samplers` only, so that no package called `samplers` lands among a user's
packages.
"""

from __future__ import annotations

if not __name__.startswith("dlm_decode."):
    raise ImportError("import dlm_decode.samplers, not samplers")
