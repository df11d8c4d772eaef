"""Drafthouse: from a bare GPU host to a served model with a speculative drafter trained for it."""

__version__ = "0.1.0"
