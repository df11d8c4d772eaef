from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drafthouse.errors import ConfigError, DrafthouseError, StoreError
from drafthouse.loop.folder import FREE, RunFolder
from tests.command_line import files_of
from tests.loop_run import RUN_FILE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yml"
    path.write_text(RUN_FILE, encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path, file: Path) -> RunFolder:
    made = RunFolder.begin(tmp_path / "run", file)
    made.keep()
    return made


class TestBegin:
    def test_nothing_is_written_before_keep(self, tmp_path: Path, file: Path) -> None:
        made = RunFolder.begin(tmp_path / "deep/run", file, ["corpus.samples=64"])
        assert not made.path.parent.exists()
        made.keep()
        assert list(files_of(made.path)) == ["run.yml"]
        assert yaml.safe_load((made.path / "run.yml").read_text(encoding="utf-8")) == made.settings.model_dump(
            mode="json"
        )
        assert RunFolder.open(made.path).settings == made.settings
        assert made.settings.corpus.samples == 64

    def test_begun_twice_is_one_run(self, run: RunFolder, file: Path) -> None:
        run.write("facts", {"a": 1})
        again = RunFolder.begin(run.path, file)
        again.keep()
        assert again.read("facts") == {"a": 1}

    def test_anew_replaces_a_run(self, run: RunFolder, file: Path) -> None:
        run.write("facts", {"a": 1})
        run.store.put("corpus/x", b"1")
        again = RunFolder.begin(run.path, file, ["corpus.samples=64"], anew=True)
        assert run.read("facts") == {"a": 1}
        again.keep()
        assert list(files_of(run.path)) == ["run.yml"]
        assert RunFolder.open(run.path).settings.corpus.samples == 64

    @pytest.mark.parametrize("anew", [True, False])
    def test_a_folder_of_something_else_is_left_alone(self, anew: bool, tmp_path: Path, file: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/thesis.tex").write_text("years of work", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"mine: this folder is not a run: it holds 'thesis.tex'; choose another"):
            RunFolder.begin(tmp_path / "mine", file, anew=anew)
        assert list(files_of(tmp_path / "mine")) == ["thesis.tex"]

    def test_a_stranger_in_a_run_is_not_removed_with_it(self, run: RunFolder, file: Path) -> None:
        (run.path / "notes.txt").write_text("mine", encoding="utf-8")
        with pytest.raises(
            ConfigError, match=r"a new run replaces the run in this folder, and 'notes.txt' would be lost"
        ):
            RunFolder.begin(run.path, file, anew=True)
        assert RunFolder.begin(run.path, file).settings == run.settings

    def test_the_users_own_run_file_is_not_removed(self, tmp_path: Path, file: Path) -> None:
        folder = tmp_path / "project"
        folder.mkdir()
        mine = file.rename(folder / "run.yml")
        with pytest.raises(ConfigError, match=r"'run\.yml' would be lost"):
            RunFolder.begin(folder, mine, anew=True)
        assert mine.read_text(encoding="utf-8") == RUN_FILE

    def test_an_empty_folder_and_a_cut_off_beginning_are_fine(self, tmp_path: Path, file: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/run.yml.partial").write_text("name: d", encoding="utf-8")
        RunFolder.begin(tmp_path / "run", file, anew=True).keep()
        assert RunFolder.open(tmp_path / "run").settings.name == "small"

    @pytest.mark.parametrize("path", ["small.yml", "small.yml/below"])
    def test_a_file_is_no_folder(self, path: str, tmp_path: Path, file: Path) -> None:
        with pytest.raises(ConfigError, match=r"this is a file|cannot be made \(Not a directory\)"):
            RunFolder.begin(tmp_path / path, file).keep()
        assert file.read_text(encoding="utf-8") == RUN_FILE


class TestOpen:
    def test_differences_are_named(self, run: RunFolder) -> None:
        with pytest.raises(ConfigError) as caught:
            RunFolder.open(run.path, overrides=["corpus.samples=64", "answers.seed=7", "extract.rows=3"])
        assert str(caught.value) == (
            f"{run.path}/run.yml: this run was begun with other settings"
            " (answers.seed: 0 → 7; corpus.samples: 48 → 64); choose another --out, or delete the folder"
        )

    def test_another_file_is_another_run(self, run: RunFolder, file: Path) -> None:
        assert RunFolder.open(run.path, file).settings == run.settings
        file.write_text(RUN_FILE.replace("samples: 48", "samples: 96"), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"\(corpus.samples: 48 → 96\)"):
            RunFolder.open(run.path, file)

    def test_overrides_count_on_top_of_the_runs_own_file(self, run: RunFolder) -> None:
        assert RunFolder.open(run.path, overrides=["corpus.samples=48"]).settings == run.settings

    def test_free_settings_hold_for_one_process(self, run: RunFolder) -> None:
        words = ["extract.rows=3", "train.ours.checkpoint_every=5", "target.device=cuda", 'extract.scratch="a b"']
        opened = RunFolder.open(run.path, overrides=words)
        assert opened.settings.extract.rows == 3
        assert opened.settings.train["ours"].checkpoint_every == 5
        assert RunFolder.open(run.path).settings == run.settings
        assert RunFolder.open(run.path, overrides=opened.overrides).settings == opened.settings

    def test_free_settings_are_settings(self, run: RunFolder) -> None:
        values = run.settings.model_dump(mode="json")
        for free in FREE:
            section, _, name = free.rpartition(".")
            for part in section.replace("*", "ours").split(".") if section else ():
                values = values[part]
            assert any(key.startswith(name.removesuffix("*")) for key in values), free
            values = run.settings.model_dump(mode="json")

    def test_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"nowhere: there is no run here; check --out, or begin one with"):
            RunFolder.open(tmp_path / "nowhere")
        assert list(tmp_path.iterdir()) == []

    def test_a_run_file_that_was_damaged(self, run: RunFolder) -> None:
        (run.path / "run.yml").write_text("name: [", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"run.yml: not valid YAML"):
            RunFolder.open(run.path)

    def test_the_store_is_the_settings_one(self, run: RunFolder, tmp_path: Path, file: Path) -> None:
        assert run.store.url == f"file://{run.path}/store"
        elsewhere = RunFolder.begin(tmp_path / "b", file, [f"store={tmp_path}/objects"])
        assert elsewhere.store.url == f"file://{tmp_path}/objects"


class TestResults:
    def test_written_and_read(self, run: RunFolder) -> None:
        assert run.read("facts") is None
        run.write("facts", {"a": [1, None, "ü"]})
        run.write("facts", {"a": 2})
        assert run.read("facts") == {"a": 2}
        assert list(files_of(run.path)) == ["facts.json", "run.yml"]

    def test_damaged(self, run: RunFolder) -> None:
        (run.path / "facts.json").write_text('{"a": ', encoding="utf-8")
        with pytest.raises(ConfigError, match=r"facts.json: this result is damaged; delete it and run its step again"):
            run.read("facts")

    def test_a_write_that_fails_keeps_the_old_one(self, run: RunFolder) -> None:
        run.write("facts", {"a": 1})
        (run.path / "facts.json.partial").mkdir()
        with pytest.raises(StoreError) as caught:
            run.write("facts", {"a": 2})
        assert isinstance(caught.value, DrafthouseError)
        assert run.read("facts") == {"a": 1}


class TestTimed:
    def test_steps_add_up_until_they_have_ended(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([0.0, 2.0, 10.0, 13.0, 20.0, 29.0])
        monkeypatch.setattr("drafthouse.loop.folder.time.perf_counter", lambda: next(clock))
        with pytest.raises(ValueError, match="half-way"), run.timed("train"):
            raise ValueError("half-way")
        assert run.read("seconds") == {"train": 2.0}
        with run.timed("train"):
            pass
        assert run.read("seconds") == {"train": 5.0}
        with run.timed("train"):
            pass
        assert run.read("seconds") == {"train": 5.0}, "it only looked whether all was done"
