"""Exact decoding of hybrid targets: autoregressive, chain (DFlash) and tree (DDTree)."""

from drafthouse.decode.forward import Stepper
from drafthouse.decode.generate import DecodeSettings, Generation, decode

__all__ = ["DecodeSettings", "Generation", "Stepper", "decode"]
