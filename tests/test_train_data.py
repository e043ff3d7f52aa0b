"""What training reads and writes: prompts, answers, batches, features."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import golden_pair

from torch_dflash import generate
from torch_dflash.errors import InputError
from torch_dflash.train.answers import AnswerPlan, write_answers
from torch_dflash.train.batches import BatchPlan, Order, draw_anchors, generator, make_data
from torch_dflash.train.bulk import BulkPlan, Opening, bulk_answers
from torch_dflash.train.features import cache_features, device_features, signal_function
from torch_dflash.train.invent import finished, openings
from torch_dflash.train.records import Answer, append_answers, mend, read_answers, read_prompts, usable_length
from torch_dflash.train.warm_start import default_taps

PROMPTS = ["def add(a, b):\n", "import os\n", "class A:\n", "for i in", "x = [", "return"]
PLAN = AnswerPlan(rows=2, max_new_tokens=6)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"turns": ["a"', "line 2: is not JSON"),
        ('{"turns": []}', "line 2: needs"),
        ('{"prompt": "a"}', "line 2: needs"),
        ('{"turns": [3]}', "line 2: needs"),
        ('{"turns": [" "]}', "line 2: needs"),
        ("[]", "line 2: needs"),
    ],
)
def test_a_malformed_prompt_is_named(tmp_path: Path, line: str, reason: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["hello"]}\n' + line + "\n")
    with pytest.raises(InputError, match=reason):
        read_prompts(path)


def test_prompts_are_first_turns_and_lines_end_at_line_feeds_only(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a\u2028b", "later"]}\n{"turns": ["c"]}', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b", "c"]


def test_no_prompt_file(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_interrupted_answers_go_on_without_repeating(tmp_path: Path):
    pair, whole, killed = golden_pair("trained-bytes"), tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write_answers(pair, PROMPTS, whole, PLAN)
    lines = whole.read_text().splitlines(keepends=True)
    killed.write_text("".join(lines[:3]) + lines[3][:20])  # killed while writing the fourth
    write_answers(pair, PROMPTS, killed, PLAN)
    assert sorted(killed.read_text().splitlines(True)) == sorted(lines)
    assert killed.read_text().startswith("".join(lines[:3]))
    assert sorted(answer.index for answer in read_answers(killed)) == list(range(len(PROMPTS)))
    write_answers(pair, PROMPTS, killed, PLAN)
    assert len(read_answers(killed)) == len(PROMPTS)


def test_a_share_of_the_answers_is_drawn(tmp_path: Path):
    """Each with its own seed, so that it does not matter when it is written; the others stay greedy."""
    pair, path, half = golden_pair("trained-bytes"), tmp_path / "greedy.jsonl", tmp_path / "half.jsonl"
    mixed = replace(PLAN, sampled=0.5)
    write_answers(pair, PROMPTS, path, PLAN)
    write_answers(pair, PROMPTS, half, mixed)
    greedy = {answer.index: answer for answer in read_answers(path)}
    answers = read_answers(half)
    sampling = [mixed.sampling(answer.index) for answer in answers]
    prompts, options = [answer.prompt_ids for answer in answers], {"method": "plain", "rows": mixed.rows}
    expected = generate(pair, prompts, mixed.max_new_tokens, sampling=sampling, **options)
    assert [list(answer.answer_ids) for answer in answers] == [result.token_ids for result in expected]
    assert all(a == greedy[a.index] for a, chosen in zip(answers, sampling, strict=True) if chosen.is_greedy)
    assert {True, False} == {mixed.sampling(index).is_greedy for index in range(len(PROMPTS))}
    assert any(answer != greedy[answer.index] for answer in answers)


def test_answers_of_other_prompts_are_not_mixed(tmp_path: Path):
    pair, path = golden_pair("trained-bytes"), tmp_path / "answers.jsonl"
    append_answers(path, [Answer(0, (1, 2), (3,))])
    with pytest.raises(InputError, match="belongs to another prompt"):
        write_answers(pair, PROMPTS, path, PLAN)


def test_a_damaged_answer_is_named(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"index": 0, "prompt_ids": [1], "answer_ids": [2]}\n{"index": 1}\n')
    with pytest.raises(InputError, match="line 2: is not an answer"):
        read_answers(path)


def test_mending_leaves_whole_lines_alone(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text("a\nb\n")
    mend(path)
    assert path.read_text() == "a\nb\n"


def test_bulk_answers_are_the_engines(tmp_path: Path):
    pair, path = golden_pair("trained-bytes"), tmp_path / "answers.jsonl"
    write_answers(pair, PROMPTS, path, PLAN)
    engines = {answer.index: answer for answer in read_answers(path)}
    some = [Opening(index, answer.prompt_ids, 0) for index, answer in engines.items()]
    batches = bulk_answers(pair.target, pair.params["target"], some, BulkPlan(4, 16, 6), (256,), 0)
    assert {answer.index: answer for batch in batches for answer in batch} == engines


def test_sampled_openings_vary_and_turn_greedy():
    pair, prompt = golden_pair("trained-bytes"), tuple(b"import ")
    plan = BulkPlan(4, 16, 6)
    some = [Opening(i, prompt, n) for i, n in enumerate((3, 3, 3, 6))]
    (answers,) = bulk_answers(pair.target, pair.params["target"], some, plan, (256,), 1)
    assert [a.num_sampled for a in answers] == [3, 3, 3, 0]  # drawn to its end: trained on as a whole
    assert len({a.answer_ids[:3] for a in answers}) > 1
    for answer in answers[:3]:
        again = Opening(0, answer.prompt_ids + answer.answer_ids[:3], 0)
        ((greedy,),) = bulk_answers(pair.target, pair.params["target"], [again], BulkPlan(4, 24, 6), (256,), 0)
        assert greedy.answer_ids[:3] == answer.answer_ids[3:6]


def test_a_text_ends_where_it_begins_to_repeat_itself():
    loop = list(range(20))
    assert usable_length(list(range(100))) == 100
    assert usable_length([7] * 5 + loop * 2) == 45
    assert usable_length([7] * 5 + loop * 4) == 45
    assert usable_length([]) == 0


def some_answers(count: int = 23) -> list[Answer]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 150, count)
    return [
        Answer(i, (5,) * (2 + i % 9), tuple(int(x) for x in rng.integers(0, 255, n))) for i, n in enumerate(lengths)
    ]


def test_data_knows_where_each_text_begins():
    answers = [*some_answers(3), Answer(3, (1,), (2,)), Answer(4, (1,) * 70, (2, 2, 2))]
    data = make_data(answers, 64)
    assert data.lengths.tolist() == [
        min(len(a.token_ids), 64) for a in answers[:3]
    ]  # the others leave nothing to predict
    assert data.offsets.tolist() == [0, *np.cumsum(data.lengths)[:-1].tolist()]
    assert data.first_anchor.tolist() == [len(a.prompt_ids) for a in answers[:3]]


def test_batches_depend_on_seed_and_step_alone():
    data, plan = make_data(some_answers(), 128), BatchPlan(rows=4, anchors=5, max_tokens=128, seed=1)
    order, again = Order(data, plan), Order(data, plan)
    later = again.batch(7)
    for step in range(7):
        again.batch(step)
    np.testing.assert_equal(vars(order.batch(7)[0]), vars(later[0]))
    assert sorted(np.concatenate([order.rows_of(s) for s in range(5)]).tolist()) != list(range(20))
    assert len({int(row) for s in range(5) for row in order.rows_of(s)}) == 20  # none twice in an epoch
    other = Order(data, replace(plan, seed=2))
    assert any((order.rows_of(s) != other.rows_of(s)).any() for s in range(5))


def test_anchors_lie_inside_the_answer():
    first, lengths = np.array([3, 10, 2]), np.array([20, 13, 64])
    anchors, used = draw_anchors(first, lengths, 6, generator(0))
    assert used.sum(axis=1).tolist() == [6, 2, 6]
    for row in range(3):
        mine = anchors[row][used[row]]
        assert len(set(mine.tolist())) == len(mine)
        assert (mine >= first[row]).all()
        assert (mine <= lengths[row] - 2).all()


def test_features_on_disk_and_in_memory_are_the_targets(tmp_path: Path):
    pair, data = golden_pair("trained-bytes"), make_data(some_answers(5), 128)
    params, taps = pair.params["target"], (1, 3)
    stored, held = (
        cache_features(pair.target, params, taps, data, tmp_path),
        device_features(pair.target, params, taps, data),
    )
    wanted = np.asarray(signal_function(pair.target, taps)(params, data.token_ids[2:3])[0][0])
    length = data.lengths[2]
    for store in (stored, held):
        got = np.asarray(store.gather(data.offsets[2:3], 128)[0], np.float32)
        np.testing.assert_allclose(got[:length], wanted[:length], rtol=2e-2, atol=1e-2)  # bf16
    before = (tmp_path / "features.npy").read_bytes()
    progress = json.loads((tmp_path / "features.json").read_text())
    (tmp_path / "features.json").write_text(json.dumps(progress | {"texts_done": 0}))  # killed before the first batch
    cache_features(pair.target, params, taps, data, tmp_path)
    assert (tmp_path / "features.npy").read_bytes() == before
    with pytest.raises(InputError, match="other texts, taps or teacher"):
        cache_features(pair.target, params, (1, 4), data, tmp_path)


def test_the_teacher_is_the_targets_distribution(tmp_path: Path):
    """Behind each token of a greedy answer its likeliest token is the next one; all its tokens share probability 1."""
    pair = golden_pair("trained-bytes")
    params, size = pair.params["target"], pair.target.config.vocab_size
    some = [Opening(i, tuple(prompt.encode()), 0) for i, prompt in enumerate(PROMPTS[:4])]
    (answers,) = bulk_answers(pair.target, params, some, BulkPlan(4, 16, 6), (256,), 0)
    data = make_data(answers, 128)
    stores = (
        cache_features(pair.target, params, (1, 3), data, tmp_path, size),
        device_features(pair.target, params, (1, 3), data, size),
    )
    for teacher in (store.teacher(data.offsets, 32) for store in stores):
        assert teacher.ids.shape == teacher.log_probs.shape == (len(answers), 32, size)
        for row, answer in enumerate(answers):
            first, length = len(answer.prompt_ids), len(answer.token_ids)
            guesses = np.asarray(teacher.ids[row, first - 1 : length - 1, 0])
            assert guesses.tolist() == list(answer.answer_ids)
            shares = np.exp(np.asarray(teacher.log_probs[row, :length]))
            np.testing.assert_allclose(shares.sum(axis=-1), 1, rtol=1e-4)
            assert (np.diff(shares, axis=-1) <= 0).all()
    with pytest.raises(InputError, match="other texts, taps or teacher"):
        cache_features(pair.target, params, (1, 3), data, tmp_path, size - 1)


def test_default_taps():
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(30, 4) == (1, 10, 18, 27)
    with pytest.raises(InputError, match="no 5 default taps"):
        default_taps(4, 5)


def test_invented_prompts():
    made = openings([["one two three four five six"], ["seven eight"]], 40, seed=0)
    assert made == openings([["one two three four five six"], ["seven eight"]], 40, seed=0)
    plain = [text for text in made if "```" not in text]
    assert len(plain) < 40
    assert all("one two three four five six".startswith(t) or t == "seven" for t in plain)
    signature = "Go on:\n```python\ndef f("
    assert finished(signature, 'a):\n    """ Add. """\n    return') == signature + 'a):\n    """ Add. """\n```'
    assert finished(signature, "a): return") is None
    assert finished("What is", " this? ") == "What is this?"
