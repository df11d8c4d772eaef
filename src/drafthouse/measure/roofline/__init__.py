"""The least time that one decode step of a hybrid model can take on given hardware, and how far a measurement is."""

from __future__ import annotations

from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.hardware import Hardware, known_hardware, load_hardware
from drafthouse.measure.roofline.serving import Serving
from drafthouse.measure.roofline.shapes import Shape
from drafthouse.measure.roofline.step import Component, Roofline, roofline

__all__ = [
    "Component",
    "Hardware",
    "Roofline",
    "RooflineError",
    "Serving",
    "Shape",
    "known_hardware",
    "load_hardware",
    "roofline",
]
