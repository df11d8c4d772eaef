"""What a GPU can do at most: bytes from its memory, FLOPs, and what it costs to reach its neighbours.

The table `hardware.yml` holds vendors' figures, each with its source. A node's own figures (`probe`) take their
place where the node can be measured.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal, Self

import yaml
from pydantic import Field, model_validator

from drafthouse.config import Settings, validate
from drafthouse.measure.roofline.errors import RooflineError

LinkKind = Literal["pcie", "nvlink"]
# Gigatransfers a second of one lane, by generation; all of these use 128b/130b coding.
_PCIE_GT_S = {3: 8.0, 4: 16.0, 5: 32.0}


class Figure(Settings):
    """A number and where it is from."""

    value: float = Field(gt=0)
    source: str = Field(min_length=1)


class Link(Settings):
    """Between the GPUs of one node.

    Attributes:
        gb_s: one direction.
        base_us, hop_us: what one collective costs before its first byte: once, and for each step of its ring.
    """

    kind: LinkKind
    gb_s: Figure
    base_us: Figure
    hop_us: Figure


class Hardware(Settings):
    """One kind of GPU (or a CPU) as the roofline needs it.

    Attributes:
        memory_gb: None where it is not known.
        bandwidth_gb_s: of its memory.
        tflops: dense, float32 accumulation, by "bfloat16", "fp8", "fp4", "float32".
        links: by kind, empty where there is no neighbour to reach.
        link: the kind that this node uses.
        notes: what a reader must know of the figures, as sentences.
    """

    name: str
    title: str
    reported_as: tuple[str, ...] = ()
    memory_gb: Figure | None = None
    bandwidth_gb_s: Figure
    tflops: dict[str, Figure]
    links: dict[LinkKind, Link] = Field(default_factory=dict)
    link: LinkKind | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.link is not None and self.link not in self.links:
            raise ValueError(f"its link '{self.link}' is not among its links")
        return self

    def with_link(self, kind: str) -> Hardware:
        """The same GPU over another of its links.

        Raises:
            RooflineError: it has no such link.
        """
        if kind not in self.links:
            raise RooflineError(
                f"{self.title} has no link '{kind}'",
                where=self.name,
                fix=f"use one of {', '.join(self.links) or 'none: it stands alone'}",
            )
        return self.model_copy(update={"link": kind})

    def tensor_tflops(self, weights: str) -> Figure:
        """Rate at which matrices of this weight type are multiplied.

        Types that the GPU has no units for are unpacked and multiplied as bfloat16, as weight-only kernels do.
        """
        wanted = {"nvfp4": "fp4", "mxfp4": "fp4"}.get(weights, weights)
        return self.tflops.get(wanted) or self.tflops.get("bfloat16") or self.tflops["float32"]


class _Latency(Settings):
    base: Figure
    hop: dict[LinkKind, Figure]


class _Entry(Settings):
    title: str
    reported_as: tuple[str, ...]
    memory: Figure
    bandwidth: Figure
    tflops: dict[Literal["bfloat16", "fp8", "fp4", "float32"], Figure]
    links: dict[LinkKind, Figure]
    link: LinkKind


class _Table(Settings):
    sources: dict[str, str]
    latency_us: _Latency
    hardware: dict[str, _Entry]


def known_hardware() -> dict[str, Hardware]:
    """Every entry of the table by its name; a figure's source is the full text."""
    table = _table()
    return {name: _hardware(name, entry, table) for name, entry in table.hardware.items()}


def load_hardware(name: str) -> Hardware:
    """An entry by its name ("a6000") or by the name that nvidia-smi prints ("NVIDIA RTX A6000").

    Raises:
        RooflineError: no such entry; the sentence lists the known ones.
    """
    known = known_hardware()
    for key, entry in known.items():
        if name.casefold() in {key.casefold(), *(reported.casefold() for reported in entry.reported_as)}:
            return entry
    raise RooflineError(
        f"no hardware is called '{name}'",
        where="--hardware",
        fix=f"choose one of {', '.join(known)}, or 'probe' to measure this machine",
    )


def pcie_gb_s(generation: int, width: int) -> float:
    """GB/s in one direction of a PCI Express link, coding taken off, packet headers not.

    Raises:
        RooflineError: a generation that this table does not know.
    """
    if generation not in _PCIE_GT_S:
        raise RooflineError(
            f"PCI Express generation {generation} is not in the table", fix=f"it knows {sorted(_PCIE_GT_S)}"
        )
    return _PCIE_GT_S[generation] * width * 128 / 130 / 8


def link_of(kind: LinkKind, gb_s: Figure) -> Link:
    """A link with the table's latencies for its kind."""
    table = _table()
    return Link(
        kind=kind,
        gb_s=gb_s,
        base_us=_cited(table.latency_us.base, table),
        hop_us=_cited(table.latency_us.hop[kind], table),
    )


@cache
def _table() -> _Table:
    file = resources.files(__package__).joinpath("hardware.yml")
    return validate(_Table, yaml.safe_load(file.read_text(encoding="utf-8")), "hardware.yml")


def _hardware(name: str, entry: _Entry, table: _Table) -> Hardware:
    return Hardware(
        name=name,
        title=entry.title,
        reported_as=entry.reported_as,
        memory_gb=_cited(entry.memory, table),
        bandwidth_gb_s=_cited(entry.bandwidth, table),
        tflops={kind: _cited(figure, table) for kind, figure in entry.tflops.items()},
        links={kind: link_of(kind, _cited(figure, table)) for kind, figure in entry.links.items()},
        link=entry.link,
    )


def _cited(figure: Figure, table: _Table) -> Figure:
    return Figure(value=figure.value, source=table.sources[figure.source])
