"""Models that show what the attention is for: a GEM-like model and the baselines it is compared with."""

from models.build import MODELS, build_model

__all__ = ["MODELS", "build_model"]
