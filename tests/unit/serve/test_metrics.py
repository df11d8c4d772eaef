from __future__ import annotations

import pytest

from drafthouse.serve.metrics import acceptance, parse

# As vLLM's CPU build 0.32.0 shows it.
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="embedded"} 26.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="embedded"} 1.796024790498389e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="embedded"} 182.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="embedded"} 71.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="embedded",position="0"} 24.0
"""


class TestParse:
    def test_a_real_page(self) -> None:
        found = parse(VLLM)
        assert found["vllm:spec_decode_num_drafts_total"] == 26
        assert found["vllm:spec_decode_num_accepted_tokens_total"] == 71
        assert "HELP" not in " ".join(found)

    def test_series_of_one_name_are_added(self) -> None:
        assert parse('a_total{rank="0"} 1\na_total{rank="1"} 2.5\n')["a_total"] == 3.5

    def test_forms_of_a_line(self) -> None:
        page = 'plain 1\nwith_time 2 1700000000\nlabel{text="a } b"} 3\nnot a number\nword nan?\n\ninf +Inf\n'
        assert parse(page) == {"plain": 1, "with_time": 2, "label": 3, "inf": float("inf")}


class TestAcceptance:
    def test_vllm(self) -> None:
        read = acceptance({}, parse(VLLM))
        assert read is not None
        assert (read.length, read.rounds) == (pytest.approx(1 + 71 / 26), 26)

    def test_only_what_happened_in_between(self) -> None:
        before = {"vllm:spec_decode_num_drafts_total": 16.0, "vllm:spec_decode_num_accepted_tokens_total": 71.0}
        read = acceptance(before, parse(VLLM))
        assert read is not None
        assert (read.length, read.rounds) == (1.0, 10)

    def test_sglang_counts_without_the_first_token_of_each_request(self) -> None:
        after = {
            "sglang:generation_tokens_total": 101.0,
            "sglang:e2e_request_latency_seconds_count": 1.0,
            "sglang:spec_verify_calls_total": 100.0,
            "sglang:spec_accept_length": 3.0,
        }
        read = acceptance({}, after)
        assert read is not None
        assert (read.length, read.rounds) == (1.0, 100), "nothing was accepted, so it must not be above 1"

    def test_sglang_gauge_is_the_second_choice(self) -> None:
        read = acceptance({}, {"sglang:spec_accept_length": 2.04})
        assert read is not None
        assert (read.length, read.rounds) == (2.04, None)

    @pytest.mark.parametrize(
        "after",
        [
            {},
            {"sglang:spec_accept_length": 0.0},
            {"vllm:spec_decode_num_drafts_total": 0.0},
            {"sglang:generation_tokens_total": 50.0, "sglang:e2e_request_latency_seconds_count": 1.0},
        ],
    )
    def test_no_drafts(self, after: dict[str, float]) -> None:
        assert acceptance({}, after) is None
