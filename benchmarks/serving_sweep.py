"""What drafts bring to a served model: two sweeps of one engine, with drafts and without, point by point.

Make both with `drafthouse serve sweep` on one machine, under the same load, and give their `sweep.json`. The peer of
every row is the same engine, model and point without drafts. A point that only one of them has is left out, and sweeps
of different loads or generators are refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rows import Rows

from drafthouse.config import differences
from drafthouse.serve.sweep_result import Point, Sweep, read_sweep

ROOT = Path(__file__).resolve().parents[1]
# What may differ: the same server, started again, has another port.
SAME = ("load", "generator")


def pairs(drafting: Sweep, plain: Sweep) -> list[tuple[Point, Point]]:
    """Complete points that both have, in the order of the first."""
    kept = {(point.context, point.concurrency): point for point in plain.points if point.complete}
    places = [(point, kept.get((point.context, point.concurrency))) for point in drafting.points if point.complete]
    return [(ours, peer) for ours, peer in places if peer is not None]


def rows_of(drafting: Sweep, plain: Sweep) -> Rows:
    """Throughput of all requests and decode speed of one, each against the sweep without drafts."""
    wrong = [line for key in SAME for line in differences(plain.settings.get(key), drafting.settings.get(key), key)]
    if wrong:
        raise SystemExit(f"the sweeps were made under different settings: {'; '.join(wrong)}")
    found = pairs(drafting, plain)
    if not found:
        raise SystemExit("the sweeps have no complete point in common")
    rows = Rows(seed=drafting.settings["load"]["seed"])
    for ours, peer in found:
        at = f"{ours.concurrency} at once, {ours.context} tokens"
        drafts = "" if ours.acceptance is None else f", acceptance {ours.acceptance:.2f}"
        speed, before = ours.measured.tokens_per_s, peer.measured.tokens_per_s
        rows.add(f"throughput: {at}{drafts}", speed, "tokens/s", peer="without drafts", ratio=speed / before)
        decode, plainly = ours.decode_tokens_per_s, peer.decode_tokens_per_s
        if decode and plainly:
            rows.add(
                f"decode: {at}{drafts}", decode, "tokens/s a request", peer="without drafts", ratio=decode / plainly
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafting", type=Path, required=True, help="sweep.json of the server with drafts")
    parser.add_argument("--plain", type=Path, required=True, help="sweep.json of the same server without")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "serving_sweep.json")
    words = parser.parse_args()
    rows_of(read_sweep(words.drafting), read_sweep(words.plain)).write(words.out)


if __name__ == "__main__":
    main()
