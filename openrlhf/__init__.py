"""Goal-conditioned reward models for language models."""

__version__ = "0.1.0"
