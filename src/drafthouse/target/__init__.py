"""The served model: load it, tap its layers, apply its final norm exactly once; `tiny` trains the embedded one."""

from drafthouse.target.adapter import Target

__all__ = ["Target"]
