from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drafthouse.errors import DrafthouseError
from drafthouse.serve.errors import ProfileError
from drafthouse.serve.load import load_profile, profiles_folder
from drafthouse.serve.profile import CanarySpec, Container, ModelSource, Profile, Question
from tests.unit.serve import clean
from tests.unit.serve.clean import MTP, NAMES, PROFILES


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A copy of a shipped profile, to damage."""
    path = tmp_path / f"{MTP}.yml"
    path.write_text((PROFILES / path.name).read_text(encoding="utf-8"), encoding="utf-8")
    return path


class TestShipped:
    def test_there_are_an_mtp_and_a_dflash_profile_for_each_engine_and_one_for_the_cpu(self) -> None:
        kinds = {
            (profile.engine.name, profile.engine.device, profile.speculation.method)
            for profile in map(clean.profile, NAMES)
        }
        assert kinds >= {
            ("sglang", "cuda", "mtp"),
            ("sglang", "cuda", "dflash"),
            ("vllm", "cuda", "mtp"),
            ("vllm", "cuda", "dflash"),
            ("vllm", "cpu", "dflash"),
        }

    @pytest.mark.parametrize("name", NAMES)
    def test_it_survives_being_written_and_read(self, name: str, tmp_path: Path) -> None:
        profile = clean.profile(name)
        copy = tmp_path / f"{name}.yml"
        copy.write_text(yaml.safe_dump(profile.model_dump(mode="json")), encoding="utf-8")
        assert load_profile(copy) == profile
        assert load_profile(copy).digest() == profile.digest()

    def test_the_mission_s_profile(self) -> None:
        profile = clean.profile(MTP)
        spec = profile.speculation
        assert (spec.method, spec.steps, spec.topk, spec.draft_tokens) == ("mtp", 3, 1, 4)
        assert (profile.context_length, profile.tensor_parallel) == (131_072, 2)
        assert (profile.hardware.gpus, profile.hardware.nvlink) == (2, False)


class TestLoad:
    def test_by_name_from_a_folder_below_the_repository(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(PROFILES.parents[1] / "docs")
        assert profiles_folder() == PROFILES
        assert load_profile(MTP).name == MTP

    def test_overrides(self) -> None:
        assert clean.profile(MTP, "tensor_parallel=4", "speculation.steps=2").tensor_parallel == 4

    def test_a_name_that_is_nearly_right(self) -> None:
        with pytest.raises(ProfileError, match=f"did you mean '{MTP}'"):
            load_profile("qwen3.6-27b-mtp-a6000", folder=PROFILES)

    def test_a_name_that_is_nothing_like_it(self) -> None:
        with pytest.raises(ProfileError, match=f"known are .*{MTP}"):
            load_profile("xyz", folder=PROFILES)

    def test_no_folder_of_profiles(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ProfileError, match="no inventory/profiles here or above"):
            load_profile(MTP)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError, match=r"gone\.yml: there is no such"):
            load_profile(tmp_path / "gone.yml")

    def test_a_file_that_calls_itself_otherwise(self, file: Path) -> None:
        other = file.rename(file.with_name("other.yml"))
        with pytest.raises(ProfileError, match=f"other.yml: 'name': the profile calls itself '{MTP}'; name it 'other'"):
            load_profile(other)

    @pytest.mark.parametrize(
        ("override", "sentence"),
        [
            (
                "engine.mem_fracton=0.8",
                r"unknown key 'engine\.sglang\.mem_fracton' \(known here: .*mem_fraction_static",
            ),
            ("engine.mem_fraction_static=1.2", r"'engine\.sglang\.mem_fraction_static': "),
            ("engine.version=0.5", "is not an exact version|should be a valid string"),
            ("engine.version=latest", r"'engine\.sglang\.version': 'latest' is not an exact version"),
            ("engine.name=tgi", r"'engine': .*'sglang', 'vllm'"),
            ("engine.extra_args.--page-size=1", "is not a flag's name"),
            ("speculation.method=medusa", r"'speculation': .*'none', 'mtp', 'dflash', 'eagle3'"),
            ("speculation={method: dflash}", r"'speculation\.dflash\.draft': field required"),
            ("speculation={method: eagle3}", r"'speculation\.eagle3\.draft': field required"),
            ("context_length=0", "'context_length': "),
            ("port=70000", "'port': "),
            ("tensor_parallel=two", "'tensor_parallel': "),
            ("environment.HF_TOKEN=x", "'HF_TOKEN' looks like a secret"),
            ("environment.a-b=x", "is no name of an environment variable"),
            ("container.image=sglang", "needs a tag or a digest"),
            ("container.image='example.org:5000/sglang'", "needs a tag or a digest"),
            ("container.volumes={models: relative}", "must be an absolute path"),
            ("canary.questions=[]", r"'canary\.questions': "),
            ("canary.min_right=2", r"'canary\.min_right': "),
        ],
    )
    def test_wrong_values_name_file_and_key(self, file: Path, override: str, sentence: str) -> None:
        with pytest.raises(ProfileError, match=sentence) as raised:
            load_profile(file, [override])
        assert str(raised.value).startswith(str(file))
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value, DrafthouseError)


class TestValues:
    def test_a_digest_pins_an_image(self) -> None:
        assert Container(image="example.org/sglang@sha256:" + "0" * 64).shm_gib is None

    @pytest.mark.parametrize(
        ("revision", "pinned"), [("0" * 40, True), ("main", False), (None, False), ("0" * 39, False)]
    )
    def test_only_a_commit_is_pinned(self, revision: str | None, pinned: bool) -> None:
        assert ModelSource(path="a/b", revision=revision).pinned is pinned

    @pytest.mark.parametrize(
        ("path", "local"), [("/models/x", True), ("embedded", True), ("./x", True), ("Qwen/Qwen3.6-27B", False)]
    )
    def test_folders_and_hub_ids(self, path: str, local: bool) -> None:
        assert ModelSource(path=path).local is local

    @pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("192.0.2.7", "192.0.2.7")])
    def test_an_address_that_can_be_asked(self, host: str, asked: str) -> None:
        assert clean.profile(MTP, f"host={host}").address == f"http://{asked}:30000"

    def test_world_size(self) -> None:
        profile: Profile = clean.profile(MTP, "engine.pipeline_parallel=2")
        assert profile.world_size == 4

    def test_a_question_needs_an_answer(self) -> None:
        with pytest.raises(ValueError, match="answers"):
            CanarySpec(questions=(Question(prompt="?", answers=()),))
