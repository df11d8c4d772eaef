"""The least time that one decode step can take: bytes over bandwidth, FLOPs over rate, collective by collective.

A step is one round of decoding: the drafter's passes, one pass of the target over `batch × width` rows, the update of
the recurrent states. Its parts depend on each other and follow one another, so their times add up; within a part the
slower of memory and arithmetic counts (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009). What moves
nothing large is left out, which keeps the result a bound: activations between matrices (at most some 5 % of the
weights where a batch becomes compute-bound), kernel launches, sampling, the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from drafthouse.config import validate
from drafthouse.measure.roofline.errors import RooflineError
from drafthouse.measure.roofline.hardware import Hardware, load_hardware
from drafthouse.measure.roofline.serving import ELEMENT_BYTES, WEIGHT_BITS, Serving
from drafthouse.measure.roofline.shapes import Config, DraftShape, Shape

Part = Literal["weights", "attention_cache", "recurrent_state", "logits", "draft", "all_reduce"]
PARTS: tuple[Part, ...] = ("weights", "attention_cache", "recurrent_state", "logits", "draft", "all_reduce")
Limit = Literal["memory", "compute", "link"]
_LOGIT_BYTES = 4  # engines turn logits into float32 before they sample


@dataclass(frozen=True)
class Component:
    """One thing that a step does, on one GPU.

    Attributes:
        bytes: read and written in device memory; for `link`, sent to other GPUs.
        ms: the least time that it takes.
        limit: what that time is set by.
    """

    name: str
    part: Part
    bytes: float
    flops: float
    ms: float
    limit: Limit


@dataclass(frozen=True)
class Roofline:
    """The bound of one decode step and what it is made of. Bytes, FLOPs and ms are those of ONE GPU.

    Attributes:
        width: rows that the target verifies for each request.
        longest: tokens of a round when every draft is accepted.
        acceptance: tokens of a round that the bound is told for.
        assumed: True when no acceptance was given and `longest` stands in.
        memory_bytes: weights, caches and states that must be held, engine and graphs not counted.
    """

    hardware: Hardware
    serving: Serving
    shape: Shape
    draft: DraftShape | None
    width: int
    longest: int
    components: tuple[Component, ...]
    memory_bytes: float

    @property
    def acceptance(self) -> float:
        return self.serving.acceptance or self.longest

    @property
    def assumed(self) -> bool:
        return self.serving.acceptance is None and self.longest > 1

    @property
    def step_ms(self) -> float:
        return sum(component.ms for component in self.components)

    @property
    def weights_ms(self) -> float:
        """Reading the target's layers and lm_head once."""
        return self.part_ms("weights")

    @property
    def shares(self) -> dict[Part, float]:
        """Share of the step that each part takes; they add up to 1."""
        return {part: self.part_ms(part) / self.step_ms for part in PARTS}

    @property
    def limits(self) -> dict[Limit, float]:
        """Share of the step during which memory, arithmetic or the link between GPUs sets the pace."""
        kinds: tuple[Limit, ...] = ("memory", "compute", "link")
        return {kind: sum(c.ms for c in self.components if c.limit == kind) / self.step_ms for kind in kinds}

    @property
    def bound(self) -> Limit:
        """What most of the step waits for."""
        return max(self.limits, key=lambda kind: self.limits[kind])

    @property
    def bound_tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.tokens_per_s(self.acceptance)

    @cached_property
    def plain(self) -> Roofline:
        """The same without a draft."""
        if self.serving.draft == "none":
            return self
        without = {"draft": "none", "steps": None, "width": None, "tree": False, "acceptance": None}
        return _roofline(self.shape, self.hardware, self.serving.model_copy(update=without), None)

    @property
    def break_even(self) -> float:
        """Acceptance length at which speculation is as fast as plain decoding."""
        return self.step_ms / self.plain.step_ms

    @property
    def ridge_rows(self) -> float:
        """Rows from which on the layers' matrices are limited by arithmetic instead of by memory."""
        rate = self.hardware.tensor_tflops(self.serving.weights).value * 1e12
        return rate / (self.hardware.bandwidth_gb_s.value * 1e9) * WEIGHT_BITS[self.serving.weights] / 8 / 2

    @property
    def fits(self) -> bool | None:
        """None where the hardware's memory is not known."""
        memory = self.hardware.memory_gb
        return None if memory is None else self.memory_bytes <= memory.value * 1e9

    def tokens_per_s(self, acceptance: float, step_ms: float | None = None) -> float:
        """Of all requests together at this acceptance length.

        Args:
            step_ms: time of a step; the bound's when None.
        """
        return self.serving.batch * acceptance / (step_ms or self.step_ms) * 1000

    def part_ms(self, part: Part) -> float:
        return sum(component.ms for component in self.components if component.part == part)

    def part_bytes(self, part: Part) -> float:
        return sum(component.bytes for component in self.components if component.part == part)

    def table(self, step_ms: float | None = None) -> list[dict[str, float]]:
        """Throughput against acceptance length, from 1 to `longest`.

        Args:
            step_ms: a measured time of a step; adds what is reached at that speed.
        """
        rows = []
        for acceptance in _lengths(self.longest, self.serving.acceptance):
            row = {
                "acceptance": acceptance,
                "bound_tokens_per_s": self.tokens_per_s(acceptance),
                "against_plain": acceptance / self.break_even,
            }
            if step_ms is not None:
                row["measured_tokens_per_s"] = self.tokens_per_s(acceptance, step_ms)
            rows.append(row)
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Plain values, units in the keys."""
        return {
            "hardware": self.hardware.model_dump(mode="json"),
            "serving": self.serving.model_dump(mode="json"),
            "verify_width": self.width,
            "weights_ms": self.weights_ms,
            "step_ms": self.step_ms,
            "bound_tokens_per_s": self.bound_tokens_per_s,
            "acceptance": self.acceptance,
            "acceptance_assumed": self.assumed,
            "shares": self.shares,
            "bound": self.bound,
            "limits": self.limits,
            "plain_step_ms": self.plain.step_ms,
            "plain_tokens_per_s": self.plain.bound_tokens_per_s,
            "break_even_acceptance": self.break_even,
            "ridge_rows": self.ridge_rows,
            "memory_bytes": self.memory_bytes,
            "fits_memory": self.fits,
            "components": [vars(component) for component in self.components],
            "by_acceptance": self.table(),
        }


def roofline(
    model: Config, hardware: Hardware | str, serving: Serving | Mapping[str, Any], *, draft: Config | None = None
) -> Roofline:
    """The bound of one decode step.

    Args:
        model: the target's config.json.
        hardware: an entry, or its name in the table.
        serving: how it is served.
        draft: the drafter's config.json; needed for `dflash` and `eagle3`.

    Raises:
        RooflineError: a config without what is needed, unknown hardware, or settings that cannot be.
        ConfigError: a key of `serving` that does not exist or has a wrong value.
    """
    entry = load_hardware(hardware) if isinstance(hardware, str) else hardware
    settings = serving if isinstance(serving, Serving) else validate(Serving, dict(serving), "serving")
    shape = Shape.of(model)
    return _roofline(shape, entry, settings, _draft_shape(shape, settings, draft))


def _roofline(shape: Shape, hardware: Hardware, serving: Serving, draft: DraftShape | None) -> Roofline:
    width, longest = _width(serving, draft)
    if serving.acceptance is not None and serving.acceptance > longest:
        raise RooflineError(
            f"an acceptance length of {serving.acceptance:g} is impossible: a round has at most {longest} tokens",
            where="acceptance",
            fix=f"give a number from 1 to {longest}",
        )
    if serving.tensor_parallel > 1 and hardware.link is None:
        raise RooflineError(
            f"{hardware.title} has no link to share a model over {serving.tensor_parallel} of them",
            where=hardware.name,
            fix="use tensor_parallel 1",
        )
    step = _Step(shape, hardware, serving, draft, width)
    components = (*step.target(), *step.draft_passes(), step.collectives())
    return Roofline(hardware, serving, shape, draft, width, longest, components, step.memory_bytes())


def _draft_shape(shape: Shape, serving: Serving, draft: Config | None) -> DraftShape | None:
    if serving.draft == "mtp" and not shape.mtp_layers:
        raise RooflineError(
            "has no MTP layer (mtp_num_hidden_layers)", where="the model's config.json", fix="choose another draft"
        )
    if serving.draft not in ("dflash", "eagle3"):
        return None
    if draft is None:
        raise RooflineError(
            f"the drafter's config.json is not known, but the draft is {serving.draft}", where="draft", fix="give it"
        )
    return DraftShape.dflash(draft, shape) if serving.draft == "dflash" else DraftShape.eagle3(draft, shape)


def _width(serving: Serving, draft: DraftShape | None) -> tuple[int, int]:
    """(nodes that the target verifies, tokens of the longest round)."""
    block = draft.block if draft and serving.draft == "dflash" else serving.draft_passes + 1
    width = serving.width or block
    if width > block and not serving.tree:
        raise RooflineError(
            f"a chain of {block} tokens cannot be verified {width} wide", where="width", fix="set tree, or less width"
        )
    return width, min(block, width)


@dataclass(frozen=True)
class _Step:
    """Counts for one GPU; matrices and heads are divided among `tensor_parallel` of them."""

    shape: Shape
    hardware: Hardware
    serving: Serving
    draft: DraftShape | None
    width: int

    @property
    def rows(self) -> int:
        """Rows of the target's pass."""
        return self.serving.batch * self.width

    @property
    def ranks(self) -> int:
        return self.serving.tensor_parallel

    def target(self) -> list[Component]:
        shape, head = self.shape, self.serving.lm_head_type
        return [
            self._matrices("layers", "weights", shape.stack, self.serving.weights, self.rows),
            self._matrices("lm_head", "weights", shape.table, head, self.rows),
            self._attention(),
            self._recurrent(),
            self._logits("logits", "logits", shape.vocabulary, self.rows),
        ]

    def draft_passes(self) -> list[Component]:
        """All passes of the drafter in one round; empty without one.

        The drafter's matrices and an lm_head are read in every pass; DFlash makes one pass over its block, MTP and
        EAGLE-3 one pass a token, of which the first also takes in what was just verified.
        """
        serving, passes = self.serving, self.serving.draft_passes
        if not passes:
            return []
        kind = "float32" if serving.weights == "float32" else "bfloat16"
        if self.draft is None:
            parameters, table, attention = self.shape.mtp, self.shape.table, self.shape.attention
            keys = serving.context * self.shape.mtp_layers
        else:
            parameters, table, attention = self.draft.parameters, self.draft.table, self.draft.attention
            keys = attention.keys_seen(serving.context)
        rows = serving.batch * (self.draft.block if self.draft and self.draft.block else 1)
        taken_in = self.rows if serving.draft != "dflash" else 0
        head = serving.lm_head_type if table == self.shape.table else kind
        cache = attention.cache_bytes(self.ranks, serving.kv_bytes)
        return [
            self._matrices("draft layers", "draft", parameters, kind, rows + taken_in / passes, passes),
            self._matrices("draft lm_head", "draft", table, head, rows, passes),
            self._component(
                "draft attention cache",
                "draft",
                passes * serving.batch * keys * cache,
                passes * rows * attention.flops(keys) / self.ranks,
                self.hardware.tensor_tflops("bfloat16").value,
            ),
            self._logits("draft logits", "draft", table // self.shape.hidden, passes * rows),
        ]

    def collectives(self) -> Component:
        """Sums after attention and feed-forward of every layer and after the embedding; gathering of logits."""
        if self.ranks == 1 or self.hardware.link is None:
            return Component("all-reduce", "all_reduce", 0.0, 0.0, 0.0, "link")
        serving, hidden = self.serving, self.shape.hidden
        counts = [(2 * self.shape.layers + 1, self.rows, self.shape.vocabulary, 1)]
        if passes := serving.draft_passes:
            layers = self.draft.attention.layers if self.draft else self.shape.mtp_layers
            rows = serving.batch * (self.draft.block if self.draft and self.draft.block else 1)
            vocabulary = (self.draft.table if self.draft else self.shape.table) // hidden
            counts.append((2 * layers + 1, rows, vocabulary, passes))
        link, others = self.hardware.links[self.hardware.link], self.ranks - 1
        moved = microseconds = 0.0
        for sums, rows, vocabulary, passes in counts:
            # A ring sends (N−1)/N of a message in each of its two rounds; gathering has one round.
            summed = 2 * others / self.ranks * rows * hidden * serving.activation_bytes
            gathered = others / self.ranks * rows * vocabulary * serving.activation_bytes
            moved += passes * (sums * summed + gathered)
            base, hop = link.base_us.value, link.hop_us.value
            microseconds += passes * (sums * (base + 2 * others * hop) + base + others * hop)
        ms = microseconds / 1e3 + moved / (link.gb_s.value * 1e9) * 1e3
        return Component("all-reduce", "all_reduce", moved, 0.0, ms, "link")

    def memory_bytes(self) -> float:
        """Held on one GPU: weights, the attention caches, one state a request and its snapshots."""
        shape, serving = self.shape, self.serving
        tables = shape.table * WEIGHT_BITS[serving.lm_head_type] / 8 * (1 if shape.tied else 2)
        weights = shape.stack * WEIGHT_BITS[serving.weights] / 8 + tables
        tokens = serving.context * shape.attention.layers
        cached = tokens * shape.attention.cache_bytes(self.ranks, serving.kv_bytes)
        if serving.draft == "mtp":
            weights += shape.mtp * serving.activation_bytes
            keys = serving.context * shape.mtp_layers
            cached += keys * shape.attention.cache_bytes(self.ranks, serving.kv_bytes)
        if self.draft:
            own_table = self.draft.table if self.draft.table != shape.table else 0
            weights += (self.draft.parameters + own_table) * serving.activation_bytes
            attention = self.draft.attention
            cached += serving.context * attention.layers * attention.cache_bytes(self.ranks, serving.kv_bytes)
        snapshots = self.width if serving.draft != "none" and serving.state_update == "snapshots" else 0
        states = self._state_bytes() * (1 + snapshots)
        return weights / self.ranks + serving.batch * (cached + states)

    def _state_bytes(self) -> float:
        """Of one sequence, on one GPU."""
        net = self.shape.deltanet
        if net is None:
            return 0.0
        kind = self.serving.state or net.state_dtype
        if kind not in ELEMENT_BYTES:
            raise RooflineError(
                f"mamba_ssm_dtype '{kind}' is unknown", where="config.json", fix="set the state's type yourself"
            )
        return net.state_bytes(ELEMENT_BYTES[kind], self.serving.activation_bytes) / self.ranks

    def _recurrent(self) -> Component:
        """States of the Gated-DeltaNet layers: read, update, write.

        Plain decoding reads and writes once. Verifying with snapshots writes a state for every node (a tree also
        reads one for every node: its parent's) and moves the accepted one into place. Replay reads the state once
        for all nodes, keeps what each node would have written, and runs the accepted path from it.
        """
        net, one = self.shape.deltanet, self._state_bytes()
        if net is None:
            return Component("recurrent state", "recurrent_state", 0.0, 0.0, 0.0, "memory")
        kept = 0.0
        if self.serving.draft == "none":
            moved = 2.0
        elif self.serving.state_update == "replay":
            moved, kept = 3.0, 2 * self.width * net.row_bytes(self.serving.activation_bytes) / self.ranks
        else:
            moved = (self.width if self.serving.tree else 1) + self.width + 2.0
        flops = self.rows * net.flops() / self.ranks
        rate = self.hardware.tflops["float32"].value
        return self._component(
            "recurrent state", "recurrent_state", self.serving.batch * (moved * one + kept), flops, rate
        )

    def _attention(self) -> Component:
        """Keys and values: read once for all nodes of a request, written for each node."""
        attention, serving = self.shape.attention, self.serving
        keys = attention.keys_seen(serving.context)
        touched = serving.batch * (keys + self.width * attention.layers)
        flops = self.rows * attention.flops(keys) / self.ranks
        cache = attention.cache_bytes(self.ranks, serving.kv_bytes)
        rate = self.hardware.tensor_tflops("bfloat16").value
        return self._component("attention cache", "attention_cache", touched * cache, flops, rate)

    def _matrices(
        self, name: str, part: Part, parameters: int, weights: str, rows: float, passes: int = 1
    ) -> Component:
        """Matrices that are read once a pass and multiplied with `rows` rows."""
        moved = passes * parameters * WEIGHT_BITS[weights] / 8 / self.ranks
        flops = passes * 2 * parameters * rows / self.ranks
        rate = self.hardware.tensor_tflops("float32" if weights == "float32" else weights).value
        return self._component(name, part, moved, flops, rate)

    def _logits(self, name: str, part: Part, vocabulary: int, rows: int) -> Component:
        """Written once by lm_head and read once by the sampler."""
        return self._component(name, part, 2 * rows * vocabulary * _LOGIT_BYTES / self.ranks, 0.0, 1.0)

    def _component(self, name: str, part: Part, moved: float, flops: float, tflops: float) -> Component:
        memory = moved / (self.hardware.bandwidth_gb_s.value * 1e9) * 1e3
        compute = flops / (tflops * 1e12) * 1e3
        return Component(name, part, moved, flops, max(memory, compute), "compute" if compute > memory else "memory")


def _lengths(longest: int, given: float | None) -> list[float]:
    """Acceptance lengths for a table: at most some twenty, the given one among them."""
    step = 0.25 if longest <= 4 else 0.5 if longest <= 8 else 1.0
    lengths = {1 + step * place for place in range(int((longest - 1) / step) + 1)}
    return sorted(lengths | ({given} if given else set()))
