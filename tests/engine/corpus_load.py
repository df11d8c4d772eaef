#!/usr/bin/env python3
"""aiperf as a sweep starts it, asking what stands in a file in place of prompts that it makes up.

A drafter foresees nothing of made-up prompts, and what it does foresee nobody knows beforehand. `AIPERF` names the
program, `PROMPTS` a file with one `{"text": …}` a line, which are asked in their order.
"""

from __future__ import annotations

import os
import sys

# The options that describe made-up prompts, each with one value.
MADE_UP = {"--isl", "--isl-stddev", "--num-dataset-entries"}


def main() -> None:
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in MADE_UP:
            next(words)
        else:
            kept.append(word)
    given = ["--input-file", os.environ["PROMPTS"], "--custom-dataset-type", "single_turn"]
    program = os.environ["AIPERF"]
    os.execv(program, [program, *kept, *given, "--dataset-sampling-strategy", "sequential"])


if __name__ == "__main__":
    main()
