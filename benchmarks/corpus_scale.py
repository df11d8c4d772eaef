"""The corpus at scale: templates and tokens against the bare tokenizer, and a million conversations end to end.

python benchmarks/corpus_scale.py                              # leaves benchmarks/results/corpus_scale.json
python benchmarks/corpus_scale.py --sizes 1000 --chats 300 --out /tmp/rows.json
python benchmarks/corpus_scale.py --tokenizer FOLDER           # another tokenizer than that of the small target

Every size is curated (read, filtered, deduplicated, shuffled, written) and tokenised by a process of its own, whose
peak memory is the kernel's figure (VmHWM; ru_maxrss for the largest process that it started).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rows import Rows, race

from drafthouse.corpus import ChatTemplate, Conversation, Message, load_tokenizer
from drafthouse.corpus.curate import curate
from drafthouse.corpus.curation import CurationSettings
from drafthouse.corpus.tokenise import tokenise

SEED = 0
SHARES = {"messages": 0.4, "sharegpt": 0.3, "alpaca": 0.2, "glaive": 0.1}


class Writer:
    """Synthetic conversations: words that look like words, one in a hundred repeated, one in a hundred nearly so."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        syllables = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]
        self._words = ["".join(self._draw.choices(syllables, k=self._draw.randint(1, 4))) for _ in range(20_000)]

    def words(self, low: int, high: int) -> str:
        return " ".join(self._draw.choices(self._words, k=self._draw.randint(low, high)))

    def pair(self) -> tuple[str, str]:
        return f"{self.words(5, 25).capitalize()}?", f"{self.words(10, 40).capitalize()}."

    def record(self, form: str, asked: str, said: str) -> dict[str, Any]:
        if form == "messages":
            return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        if form == "sharegpt":
            return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
        if form == "alpaca":
            return {"instruction": asked, "output": said}
        schema = {"name": "find", "description": self.words(3, 5), "parameters": {"type": "object", "properties": {}}}
        call = json.dumps({"what": self.words(1, 2)})
        return {
            "system": "SYSTEM: You are a helpful assistant with access to the following functions.\n"
            + json.dumps(schema),
            "chat": f'USER: {asked}\n\n\nASSISTANT: <functioncall> {{"name": "find", "arguments": \'{call}\'}}'
            f" <|endoftext|>\n\n\nFUNCTION RESPONSE: {json.dumps({'found': self.words(1, 3)})}\n\n\n"
            f"ASSISTANT: {said} <|endoftext|>\n",
        }

    def write(self, form: str, count: int, path: Path) -> None:
        last = self.pair()
        with path.open("w", encoding="utf-8") as file:
            for number in range(count):
                dice = self._draw.random()
                if dice < 0.001:
                    file.write("{broken\n")
                    continue
                if dice < 0.011 and number:
                    pass  # the same again
                elif dice < 0.021 and number:
                    last = (last[0], f"{last[1]} {self._draw.choice(self._words)}")
                else:
                    last = self.pair()
                file.write(json.dumps(self.record(form, *last)) + "\n")


def templates(rows: Rows, tokenizer_folder: Path, name: str, count: int, repeats: int) -> None:
    """Rendering, tokenising, masking and proof against the bare tokenizer on the same texts, in CPU seconds."""
    writer, tokenizer = Writer(SEED), load_tokenizer(tokenizer_folder)
    pairs = [writer.pair() for _ in range(count)]
    chats = [
        Conversation(
            id=str(number),
            kind="chat",
            messages=[Message(role="user", content=asked), Message(role="assistant", content=said)],
        )
        for number, (asked, said) in enumerate(pairs)
    ]
    template = ChatTemplate(tokenizer)
    texts = [template.render(chat).text for chat in chats]
    template.samples(chats[:8])  # the first of a shape is rendered and learned from
    backend = tokenizer.backend_tokenizer
    batches = range(0, count, 256)

    def ours() -> None:
        for at in batches:
            template.samples(chats[at : at + 256])

    def bare() -> None:
        for at in batches:
            backend.encode_batch(texts[at : at + 256], add_special_tokens=False)

    def barer() -> None:
        for at in batches:
            backend.encode_batch_fast(texts[at : at + 256], add_special_tokens=False)

    mine, raw, fast = race(repeats, ours, bare, barer)
    title = f"corpus: template, tokens, mask, proof ({name})"
    rows.add(title, count / mine, "samples/CPU-s", peer="tokenizers encode_batch", ratio=raw / mine, bar=0.85)
    rows.add(title, count / mine, "samples/CPU-s", peer="tokenizers encode_batch_fast", ratio=fast / mine)


def scale(count: int, folder: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    """Curate and tokenise `count` records that lie in `folder`; seconds, memory (MiB) and what came out."""
    settings = CurationSettings.model_validate(
        {
            "name": "synthetic",
            "kinds": {form: {} for form in SHARES},
            "sources": [
                {
                    "type": "files",
                    "name": form,
                    "kind": form,
                    "licence": "CC0-1.0",
                    "format": form,
                    "paths": [f"{form}.jsonl"],
                }
                for form in SHARES
            ],
        }
    )
    store = str(folder / "store")
    began, cpu = time.monotonic(), sum(os.times()[:4])
    curated = curate(settings, store, folder / "work", base=folder, processes=processes)
    between, cpu_between = time.monotonic(), sum(os.times()[:4])
    corpus = tokenise(store, "synthetic", "corpus", tokenizer, max_tokens=4096, processes=processes)
    ended, cpu_ended = time.monotonic(), sum(os.times()[:4])
    return {
        "records": count,
        "samples": corpus.samples,
        "tokens": corpus.tokens,
        "drops": {name: dict(counts) for name, counts in curated["train"].drops.items()},
        "digest": corpus.digest,
        "curate_s": between - began,
        "tokenise_s": ended - between,
        "curate_cpu_s": cpu_between - cpu,
        "tokenise_cpu_s": cpu_ended - cpu_between,
        "rss_parent": peak_memory(),
        "rss_worker": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "load": os.getloadavg()[0],
    }


def peak_memory() -> float:
    """MiB of this process at its peak. Not ru_maxrss: that begins with what the parent held when it started us."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(count: int, tokenizer: Path, processes: int, base: Path, keep: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = Path(name) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        writer = Writer(SEED)
        for form, share in SHARES.items():
            path = folder / f"{form}.jsonl"
            if not path.exists():
                writer.write(form, round(count * share), path)
        words = [sys.executable, __file__, "--one", str(count), "--folder", str(folder), "--tokenizer", str(tokenizer)]
        done = subprocess.run([*words, "--processes", str(processes)], check=True, capture_output=True, text=True)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(result))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "corpus_scale.json")
    parser.add_argument("--sizes", default="10000,100000,1000000", help="conversations, comma separated; '' for none")
    parser.add_argument("--chats", type=int, default=4000, help="chats of the comparison with the bare tokenizer")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokenizer", type=Path, action="append", help="folder; may be repeated")
    parser.add_argument("--base", type=Path, help="where data lies while it is measured")
    parser.add_argument("--keep", type=Path, help="folder that the last size is left in")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.one is not None:
        print(json.dumps(scale(wanted.one, wanted.folder, wanted.tokenizer[0], wanted.processes)))
        return
    from drafthouse.loop.tiny import embedded_target  # brings torch, which the measured processes do without

    tokenizers = wanted.tokenizer or [embedded_target()]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = Rows(SEED)
    if wanted.chats:
        for folder in tokenizers:
            size = load_tokenizer(folder).backend_tokenizer.get_vocab_size()
            templates(rows, folder, f"{size} tokens", wanted.chats, wanted.repeats)
    sizes = [int(size) for size in wanted.sizes.split(",") if size]
    results = [
        measure(size, tokenizers[0], wanted.processes, wanted.base, wanted.keep if size == sizes[-1] else None)
        for size in sizes
    ]
    for result in results:
        count, first = result["records"], results[0]
        name = f"corpus: {count} records end to end on {wanted.processes} processes"
        wall = result["curate_s"] + result["tokenise_s"]
        cpu = result["curate_cpu_s"] + result["tokenise_cpu_s"]
        rows.add(name, wall, "s", peer=f"CPU seconds of its processes (load {result['load']:.1f})", ratio=cpu / wall)
        for who in ("parent", "worker"):
            rows.add(
                f"corpus: peak memory of the {who}, {count} records",
                result[f"rss_{who}"],
                "MiB",
                peer=f"the same at {first['records']} records",
                ratio=first[f"rss_{who}"] / result[f"rss_{who}"],
                bar=None if result is first else 0.9,
            )
    rows.write(wanted.out)


if __name__ == "__main__":
    main()
