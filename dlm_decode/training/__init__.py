"""Training of the bundled tiny models: an autoregressive twin first, then a masked diffusion model
from its weights.
"""
