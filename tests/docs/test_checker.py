"""The checker itself: what rots is found, and what is whole passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.blocks import Command, commands, files
from tests.docs.evidence import evidence
from tests.docs.parsers import read, verbs_and_options
from tests.docs.report import Row, write
from tests.docs.table import entries, proof_of, tier_of
from tests.docs.workplace import Workplace, differences, execute

MOVES = "tests/fleet/test_extraction_moves.py::"
MOVED = f"{MOVES}test_every_shard_is_there_once_after_a_migration_and_the_death_of_a_node"


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def command(line: str) -> Command:
    return Command("docs/x.md", 1, 1, tuple(line.split()))


class TestBlocks:
    def test_commands_are_split_as_a_shell_does(self, tmp_path: Path) -> None:
        text = (
            "```sh\nA=1 one --two 'three four'   # five\nsix \\\n    --seven && eight\n\nnine &\n```\n"
            "- item\n\n  ```sh\n  ten\n  ```\n"
        )
        found = commands(page(tmp_path, text))
        assert [(one.line, one.words) for one in found] == [
            (2, ("one", "--two", "three four")),
            (3, ("six", "--seven")),
            (3, ("eight",)),
            (6, ("nine",)),
            (11, ("ten",)),
        ]
        assert found[0].variables == (("A", "1"),)

    def test_output_belongs_to_the_command_above_it(self, tmp_path: Path) -> None:
        one, two = commands(page(tmp_path, "```console\n$ one\nout\nmore\n$ two\n```\n"))
        assert (one.shown, two.shown) == (("out", "more"), None)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("```sh\none\n", ":1: the block is never closed"),
            ("```sh\none 'two\n```\n", ":2: No closing quotation"),
            ("```text\ndrafthouse demo\n```\n", ":2: a command in a `text` block"),
            ("```\n$ fab status\n```\n", ":2: a command in a `plain` block"),
        ],
    )
    def test_what_is_not_understood_is_named_with_its_line(self, text: str, said: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=said):
            commands(page(tmp_path, text))

    def test_titled_blocks_are_files(self, tmp_path: Path) -> None:
        assert files(page(tmp_path, '```yaml title="a/b.yml"\nname: x\n```\n```yaml\ny: 1\n```\n')) == {
            "a/b.yml": "name: x\n"
        }


class TestTable:
    def test_a_command_without_a_proof_is_named_with_page_and_line(self) -> None:
        with pytest.raises(ValueError, match=r"docs/x\.md:1: nothing proves `rm -rf /`"):
            proof_of(command("rm -rf /"), entries())

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("- {executed: x, tested: y}", "needs one of"),
            ("- {match: x}", "needs one of"),
            ("- {tested: x, test: y}", "tier is missing"),
            ("- {parsed: x}", "why is missing"),
            ("- {executed: x, because: y}", "unknown because"),
            ("- {tested: x, test: y, tier: make coffee}", "no tier 'make coffee'"),
        ],
    )
    def test_entries_that_are_none(self, text: str, said: str, tmp_path: Path) -> None:
        path = tmp_path / "commands.yml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            entries(path)

    @pytest.mark.parametrize(
        ("test", "tier"),
        [
            ("tests/roles/test_site.py::test_reset_restores", "make test"),
            ("tests/vm/test_site.py::TestReset::test_x", "make test-vm"),
            ("tests/engine/test_served.py::test_x", "make engine"),
            ("tests/containers/test_images.py::test_x", "make test-images"),
        ],
    )
    def test_tiers_are_read_from_markers(self, test: str, tier: str) -> None:
        assert tier_of(test) == tier


class TestEvidence:
    @pytest.mark.parametrize(
        ("line", "missing"),
        [
            ("fab migrate --from a --to b", None),
            ("fab recover --from a --to b", None),
            ("fab deploy --job x --dry-run", None),
            ("fab recover --from a --to b --force", "no call has --force --from --to"),
            ("fab unlock --job x --reason y", "`unlock` is not said there"),
            ("ansible-playbook site.yml", "`ansible-playbook` is not run there"),
        ],
    )
    def test_program_verb_and_options_must_stand_in_the_test(self, line: str, missing: str | None) -> None:
        program, *words = line.split()
        assert evidence(MOVED).runs(program, *verbs_and_options(program, tuple(words))) == missing

    @pytest.mark.parametrize("test", [f"{MOVES}test_nothing", "tests/no.py::test_x", "docs/index.md::test_x", MOVES])
    def test_a_test_that_is_not_there(self, test: str) -> None:
        with pytest.raises(ValueError, match="there is no test"):
            evidence(test)

    def test_a_helper_is_no_test(self) -> None:
        with pytest.raises(ValueError, match="is no test"):
            evidence(f"{MOVES}working")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("drafthouse demo --out x --set a.b=1", None),
        ("drafthouse states", "is a group of verbs"),
        ("drafthouse demo --frob", "No such option"),
        ("drafthouse frob", "there is no verb 'frob'"),
        ("fab migrate --from a --to b", None),
        ("fab migrate --form a", "form"),
        ("fab frob", "frob"),
        ("make demo", None),
        ("make coffee", "coffee"),
        ("torchrun --standalone --nproc-per-node=2 -m drafthouse.cli states extract --out x", None),
        ("torchrun --standalone -m drafthouse.cli states extract --oops", "No such option"),
        ("pip install -e .[fleet]", None),
        ("pip install -e .[fleeet]", "no extra 'fleeet'"),
        ("docker run x", "no parser is known"),
    ],
)
def test_the_programs_own_parsers_decide(line: str, said: str | None) -> None:
    program, *words = line.split()
    if said is None:
        read(program, tuple(words))
        return
    with pytest.raises(ValueError, match=said):
        read(program, tuple(words))


class TestExecution:
    def test_status_and_output_are_those_of_the_command(self, tmp_path: Path) -> None:
        found = execute(command("ls -d nowhere"), tmp_path)
        assert found.code != 0
        assert "nowhere" in found.output

    def test_it_runs_in_the_folder_and_may_write_a_file(self, tmp_path: Path) -> None:
        execute(command("ls -a > list"), tmp_path)
        assert ".." in (tmp_path / "list").read_text(encoding="utf-8")

    def test_a_block_stays_in_the_folder_that_it_went_to(self, tmp_path: Path) -> None:
        page_of = [command("cd ansible"), command("ls site.yml")]
        place = Workplace(tmp_path, {"docs/x.md": page_of, "docs/quickstart.md": []})
        assert place.outcome(page_of[1]).code == 0

    def test_what_only_looks_is_executed_once_for_all_pages(self, tmp_path: Path) -> None:
        one, other = command("ls -d"), Command("docs/y.md", 9, 9, ("ls", "-d"))
        pages = {"docs/x.md": [one], "docs/y.md": [other], "docs/quickstart.md": []}
        place = Workplace(tmp_path, pages, frozenset({"ls -d"}))
        assert place.outcome(one) is place.outcome(other)

    @pytest.mark.parametrize(
        ("shown", "missing"),
        [
            (("8 shards: 8 done",), []),
            (("9 shards: 7 done", "wrote /a/b.c in 3.1 s"), []),
            (("… in 3.1 s",), []),
            (("8 shards: 8 lost",), ["8 shards: 8 lost"]),
            (("wrote /a/b.c in 3.1 s", "8 shards: 8 done"), ["8 shards: 8 done"]),
        ],
    )
    def test_lines_are_compared_in_order_without_numbers_and_paths(
        self, shown: tuple[str, ...], missing: list[str]
    ) -> None:
        assert differences(shown, "8 shards: 8 done\nwrote /x/y in 12 s\n") == missing


def test_the_report_counts_by_kind(tmp_path: Path) -> None:
    rows = [Row("a.md:1", "one | two", "executed", "exit 0", 1.25), Row("a.md:2", "three", "parsed", "no GPU", 0.5)]
    write(rows, tmp_path / "deep" / "report", 3)
    found = json.loads((tmp_path / "deep" / "report.json").read_text(encoding="utf-8"))
    assert (found["commands"], found["proven"], found["by_kind"]) == (3, 2, {"executed": 1, "parsed": 1})
    text = (tmp_path / "deep" / "report.md").read_text(encoding="utf-8")
    assert "2 of 3 are proven, in 2 s: 1 executed, 1 parsed." in text
    assert r"| a.md:1 | `one \| two` | executed | exit 0 | 1.2 |" in text
