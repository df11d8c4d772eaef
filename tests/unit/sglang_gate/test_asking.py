from __future__ import annotations

import json

import numpy as np
import pytest
from sglang_gate.asking import Answer, Client, NoAnswerError

from tests.doubles.openai_server import Behaviour, openai_double

PROMPT = np.array([5, 6, 7], dtype=np.int32)


def body(*answers: object) -> bytes:
    return json.dumps(list(answers)).encode()


def test_texts_carry_their_passes() -> None:
    one = {"output_ids": [1, 2], "meta_info": {"spec_verify_ct": 1}}
    two = {"output_ids": [3], "meta_info": {}}
    with openai_double(Behaviour(body=body(one, two))) as double:
        answers, seconds = Client(double.url, [2, 9], 12).texts([PROMPT, PROMPT[:1]])
    assert answers == [Answer([1, 2], 1), Answer([3], None)]
    assert seconds > 0
    [asked] = double.requests
    assert asked["input_ids"] == [[5, 6, 7], [5]]
    assert asked["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 12, "stop_token_ids": [2, 9]}


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (Behaviour(status=500, body=b"out of memory"), "/generate answered 500: out of memory"),
        (Behaviour(body=b"<html>"), "not JSON"),
        (Behaviour(body=body()), "did not answer 1 prompts"),
        (Behaviour(body=body({"text": "a"})), "lacks 'output_ids'"),
        (Behaviour(drop=True), "/generate: "),
        (Behaviour(body=body({"output_ids": [1], "meta_info": {}}), delay_s=20), "/generate: "),
    ],
)
def test_no_answer_is_one_sentence(behaviour: Behaviour, sentence: str) -> None:
    with openai_double(behaviour) as double, pytest.raises(NoAnswerError, match=sentence):
        Client(double.url, [2], 4, timeout_s=1.0).texts([PROMPT])


def test_states_of_the_prompt() -> None:
    rows = [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]
    with openai_double(Behaviour(body=body({"output_ids": [1], "meta_info": {"hidden_states": [rows]}}))) as double:
        assert Client(double.url, [2], 4).states(PROMPT, 2).tolist() == rows
        with pytest.raises(NoAnswerError, match=r"are \[3, 2\], expected \[3, 4\]"):
            Client(double.url, [2], 4).states(PROMPT, 4)
    with (
        openai_double(Behaviour(body=body({"output_ids": [1], "meta_info": {}}))) as double,
        pytest.raises(NoAnswerError, match="holds no hidden states"),
    ):
        Client(double.url, [2], 4).states(PROMPT, 2)
