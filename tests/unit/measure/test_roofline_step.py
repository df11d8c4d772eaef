from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthouse.errors import DrafthouseError
from drafthouse.measure.roofline import Roofline, RooflineError, Serving, Shape, load_hardware, roofline
from drafthouse.measure.roofline.profile import drafter_config, model_config

MODEL = model_config("Qwen/Qwen3.6-27B")[0]
DRAFTER = drafter_config("z-lab/Qwen3.6-27B-DFlash")
DENSE = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}


def bound(hardware: str = "h200", **serving: Any) -> Roofline:
    return roofline(MODEL, hardware, serving, draft=DRAFTER)


servings = st.builds(
    dict,
    tensor_parallel=st.sampled_from([1, 2, 4]),
    context=st.integers(0, 131_072),
    batch=st.integers(1, 64),
    weights=st.sampled_from(["bfloat16", "fp8", "int4", "nvfp4"]),
    kv_cache=st.sampled_from([None, "fp8_e4m3"]),
    draft=st.sampled_from(["none", "mtp", "dflash"]),
    state_update=st.sampled_from(["snapshots", "replay"]),
)


class TestShape:
    def test_parameters_of_the_27b(self) -> None:
        shape = Shape.of(MODEL)
        assert shape.deltanet is not None
        assert (shape.deltanet.layers, shape.attention.layers) == (48, 16)
        assert shape.deltanet.parameters(5120) + shape.feed_forward == pytest.approx(383.27e6, rel=1e-4)
        assert shape.attention.parameters(5120) + shape.feed_forward == pytest.approx(372.26e6, rel=1e-4)
        assert shape.stack == pytest.approx(24.353e9, rel=1e-4)
        assert shape.table == pytest.approx(1.2714e9, rel=1e-4)
        assert shape.mtp == pytest.approx(0.425e9, rel=2e-3)

    def test_parameters_of_the_drafter(self) -> None:
        draft = bound(draft="dflash").draft
        assert draft is not None
        assert draft.parameters == pytest.approx(1.730e9, rel=1e-3)
        assert draft.block == 16
        # Four layers see 2048 keys, the fifth sees all.
        assert draft.attention.keys_seen(10_000) == 4 * 2048 + 10_000

    def test_layer_types_mean_the_same_as_the_interval(self) -> None:
        text = dict(MODEL["text_config"])
        interval = text.pop("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(64)]
        assert Shape.of({"text_config": text | {"layer_types": kinds}}) == Shape.of(MODEL)

    def test_a_dense_model_has_no_recurrent_state(self) -> None:
        found = roofline(DENSE, "h200", {"context": 1000})
        assert found.part_ms("recurrent_state") == 0
        assert Shape.of(DENSE).stack == 4 * (1024 * (8 + 2 * 2 + 8) * 128 + 3 * 1024 * 4096)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"num_experts": 8}, "mixture of experts"),
            ({"hidden_size": None}, "'hidden_size' is None"),
            ({"num_hidden_layers": "4"}, "'num_hidden_layers' is '4'"),
            ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
            ({"layer_types": ["linear_attention"] * 4}, "'linear_num_key_heads' is None"),
        ],
    )
    def test_a_config_that_says_too_little(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(RooflineError, match=words):
            Shape.of(DENSE | change)


class TestStep:
    @settings(deadline=None, max_examples=60)
    @given(servings)
    def test_shares_add_up(self, serving: dict[str, Any]) -> None:
        found = bound(**serving)
        assert sum(found.shares.values()) == pytest.approx(1)
        assert sum(found.limits.values()) == pytest.approx(1)
        assert all(share >= 0 for share in found.shares.values())
        assert sum(component.ms for component in found.components) == pytest.approx(found.step_ms)

    @settings(deadline=None, max_examples=60)
    @given(servings, st.integers(1, 100_000), st.integers(1, 64))
    def test_more_context_and_more_requests_take_longer(self, serving: dict[str, Any], more: int, others: int) -> None:
        found = bound(**serving)
        assert bound(**serving | {"context": serving["context"] + more}).step_ms > found.step_ms
        crowd = bound(**serving | {"batch": serving["batch"] + others})
        assert crowd.step_ms > found.step_ms
        # Equal where arithmetic is what all rows wait for.
        assert crowd.bound_tokens_per_s >= found.bound_tokens_per_s * (1 - 1e-9)

    @settings(deadline=None, max_examples=60)
    @given(st.floats(1, 3.9), st.floats(0.01, 0.1))
    def test_more_acceptance_is_more_throughput(self, acceptance: float, more: float) -> None:
        less, greater = bound(draft="mtp", acceptance=acceptance), bound(draft="mtp", acceptance=acceptance + more)
        assert greater.bound_tokens_per_s > less.bound_tokens_per_s
        assert greater.step_ms == less.step_ms

    @settings(deadline=None, max_examples=60)
    @given(servings)
    def test_two_gpus_halve_the_weights(self, serving: dict[str, Any]) -> None:
        one = bound(**serving | {"tensor_parallel": 1})
        two = bound(**serving | {"tensor_parallel": 2})
        assert two.part_bytes("weights") == pytest.approx(one.part_bytes("weights") / 2)
        assert one.part_ms("all_reduce") == 0
        assert two.part_ms("all_reduce") > 0

    def test_kv_heads_fewer_than_gpus_are_replicated(self) -> None:
        cache = {ranks: bound(tensor_parallel=ranks, context=100_000).part_bytes("attention_cache") for ranks in (4, 8)}
        assert cache[8] == cache[4]

    def test_a_quantised_model_keeps_its_lm_head(self) -> None:
        gigabytes = {kind: bound(weights=kind).part_bytes("weights") / 1e9 for kind in ("bfloat16", "fp8", "int4")}
        assert gigabytes["fp8"] == pytest.approx(24.353 + 2 * 1.2714, rel=1e-4)
        assert gigabytes["int4"] == pytest.approx(24.353 * (4 + 20 / 128) / 8 + 2 * 1.2714, rel=1e-4)
        assert bound(weights="fp8", lm_head="fp8").part_bytes("weights") == bound().part_bytes("weights") / 2

    def test_gpus_without_fp8_units_compute_in_bfloat16(self) -> None:
        rates = {name: load_hardware(name).tensor_tflops("fp8").value for name in ("a6000", "h200")}
        assert rates == {"a6000": 154.8, "h200": 1979}
        assert load_hardware("b200").tensor_tflops("nvfp4").value == 9000
        assert load_hardware("h200").tensor_tflops("nvfp4").value == 989.5

    def test_many_rows_are_bound_by_arithmetic(self) -> None:
        few, many = bound(batch=16, context=128), bound(batch=512, context=128)
        layers = [found.components[0] for found in (few, many)]
        assert [component.name for component in layers] == ["layers", "layers"]
        assert [component.limit for component in layers] == ["memory", "compute"]
        assert 16 < few.ridge_rows < 512
        # Each request has a state of its own to read and write: at such a batch that is most of a step.
        assert many.shares["recurrent_state"] > 0.5 > few.shares["recurrent_state"]

    def test_replay_moves_fewer_states_than_snapshots(self) -> None:
        per_kind = {
            kind: bound(draft="dflash", width=width, tree=width > 16, state_update=update).part_ms("recurrent_state")
            for kind, width, update in (
                ("chain", 16, "snapshots"),
                ("tree", 64, "snapshots"),
                ("replayed tree", 64, "replay"),
            )
        }
        assert per_kind["replayed tree"] < per_kind["chain"] < per_kind["tree"]
        one_state = bound().part_bytes("recurrent_state") / 2
        assert bound(draft="dflash").part_bytes("recurrent_state") == pytest.approx(19 * one_state)

    def test_speculation_is_told_against_plain_decoding(self) -> None:
        found = bound(draft="mtp", acceptance=3.0)
        plain = bound()
        assert found.plain.step_ms == plain.step_ms
        assert found.break_even == pytest.approx(found.step_ms / plain.step_ms)
        at_even = found.tokens_per_s(found.break_even)
        assert at_even == pytest.approx(plain.bound_tokens_per_s)
        assert plain.plain is plain

    def test_eagle3_has_its_own_vocabulary(self) -> None:
        config = DENSE | {"hidden_size": 5120, "num_hidden_layers": 1, "draft_vocab_size": 32_000, "head_dim": 128}
        found = roofline(MODEL, "h200", {"draft": "eagle3", "steps": 3}, draft=config)
        head = next(component for component in found.components if component.name == "draft lm_head")
        assert head.bytes == 3 * 32_000 * 5120 * 2
        assert (found.width, found.longest) == (4, 4)

    def test_memory_is_held_against_the_gpu(self) -> None:
        assert bound("a6000").fits is False
        assert bound("a6000", tensor_parallel=2).fits is True
        assert bound("h200", batch=64, context=131_072).fits is False

    def test_as_dict_gives_plain_values(self) -> None:
        import json

        found = bound("a6000", tensor_parallel=2, draft="mtp", acceptance=3.1).as_dict()
        assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, allow_nan=False))
        assert found["weights_ms"] < found["step_ms"]
        assert found["bound_tokens_per_s"] == pytest.approx(3.1 / found["step_ms"] * 1000)
        assert found["acceptance_assumed"] is False
        assert [row["acceptance"] for row in found["by_acceptance"]][:2] == [1.0, 1.25]
        assert 3.1 in [row["acceptance"] for row in found["by_acceptance"]]

    def test_without_an_acceptance_length_all_drafts_count(self) -> None:
        found = bound(draft="dflash")
        assert (found.acceptance, found.assumed) == (16, True)
        assert (bound().acceptance, bound().assumed) == (1, False)


class TestWrongInput:
    @pytest.mark.parametrize(
        ("serving", "words"),
        [
            ({"draft": "mtp", "acceptance": 4.5}, "at most 4 tokens"),
            ({"draft": "mtp", "width": 8}, "a chain of 4 tokens cannot be verified 8 wide"),
            ({"acceptance": 2}, "need a draft"),
            ({"draft": "dflash", "steps": 3}, "whole block in one pass"),
            ({"tree": True}, "a tree needs a draft"),
            ({"batch": 0}, "'batch': should be greater than or equal to 1"),
            ({"weights": "float8"}, "'weights'"),
            ({"ctx": 1}, "unknown key 'ctx'"),
        ],
    )
    def test_settings_that_cannot_be(self, serving: dict[str, Any], words: str) -> None:
        with pytest.raises(DrafthouseError, match=words):
            bound(**serving)

    def test_a_drafter_is_missing(self) -> None:
        with pytest.raises(RooflineError, match=r"drafter's config\.json is not known, but the draft is dflash"):
            roofline(MODEL, "h200", {"draft": "dflash"})
        with pytest.raises(RooflineError, match="no target_layer_ids"):
            roofline(MODEL, "h200", {"draft": "dflash"}, draft=DENSE)

    def test_a_model_without_mtp(self) -> None:
        with pytest.raises(RooflineError, match="has no MTP layer"):
            roofline(DENSE, "h200", {"draft": "mtp"})

    def test_hardware_that_stands_alone_cannot_share(self) -> None:
        alone = load_hardware("h200").model_copy(update={"link": None, "links": {}})
        with pytest.raises(RooflineError, match="no link to share a model over 2"):
            roofline(MODEL, alone, Serving(tensor_parallel=2))
