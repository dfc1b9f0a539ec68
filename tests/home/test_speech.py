"""Speech data: files of all kinds at all rates, manifests good and hostile, what is left out and counted."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import soundfile
import torch
from speech_files import folder_of_tones, tone

from exogym.data import Stream
from exogym.errors import ArgumentError, DataError, ExoGymError
from exogym.home.speech import (
    find_speech,
    lines_of_shakespeare,
    read_audio,
    resample,
    speech,
    spoken,
)
from exogym.home.speech import manifest as manifests
from exogym.home.speech.manifest import read_manifest


def letters(text: str, seconds: float) -> list[int]:
    return [ord(c) % 64 for c in text]


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("hertz", [100, 3_000])
def test_a_tone_stays_the_tone_at_any_rate(rate, hertz):
    heard, wanted = resample(tone(0.7, rate, hertz), rate), tone(0.7, 16_000, hertz)
    assert len(heard) == len(wanted)
    middle = slice(1600, -1600)
    assert np.abs(heard[middle] - wanted[middle]).max() < 5e-3


def test_what_a_lower_rate_cannot_hold_is_gone():
    """A mirror image at 6 kHz would be heard; without the filter (every third sample) it is."""
    high = tone(0.5, 48_000, 10_000)
    assert np.abs(resample(high, 48_000)[800:-800]).max() < 5e-3
    assert np.abs(high[::3]).max() > 0.4


def test_resampling_agrees_with_scipy():
    import scipy.signal  # takes a second, which collecting need not

    noise = np.random.default_rng(0).standard_normal(22_050).astype(np.float32)
    smooth = scipy.signal.sosfiltfilt(scipy.signal.butter(8, 5000, fs=22_050, output="sos"), noise)
    ours, theirs = resample(smooth.astype(np.float32), 22_050), scipy.signal.resample_poly(smooth, 320, 441)
    assert len(ours) == len(theirs) and np.abs(ours - theirs)[400:-400].max() < 0.02 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.wav", {"subtype": "PCM_16"}),
        ("a.wav", {"subtype": "PCM_U8"}),
        ("a.wav", {"subtype": "FLOAT"}),
        ("a.flac", {}),
        ("a.ogg", {}),
        ("a.mp3", {}),
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_files_of_all_kinds_are_read(tmp_path, name, options, channels):
    sound = np.stack([tone(1.0, 24_000)] * channels, axis=1)
    soundfile.write(tmp_path / name, sound, 24_000, **options)
    for source in (tmp_path / name, (tmp_path / name).read_bytes()):
        samples, seconds = read_audio(source)
        assert abs(seconds - 1) < 0.1 and abs(len(samples) - 16_000) < 1_600 and samples.dtype == np.float32
        strongest = np.abs(np.fft.rfft(samples[2000:12_000])).argmax() * 16_000 / 10_000
        assert abs(strongest - 440) < 3 and 0.3 < np.abs(samples).max() < 0.7


def test_broken_files_are_refused_and_nothing_else_happens(tmp_path):
    """Whatever stands in a file: it is read, or a DataError."""
    soundfile.write(tmp_path / "a.wav", tone(0.3), 16_000)
    soundfile.write(tmp_path / "a.flac", tone(0.3), 16_000)
    draw, read = random.Random(0), 0
    for name in ("a.wav", "a.flac"):
        whole = (tmp_path / name).read_bytes()
        for _ in range(100):
            torn = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
            for _ in range(draw.randrange(8)):
                if torn:
                    torn[draw.randrange(min(len(torn), 60))] = draw.randrange(256)
            try:
                samples, _ = read_audio(bytes(torn), 30.0)
                assert len(samples) <= 30 * 16_000 + 16_000 and np.isfinite(samples).all()
                read += 1
            except DataError:
                pass
    assert 10 < read < 190  # both happen
    for bad in (b"", b"RIFF", os.urandom(5000), b"<html>"):
        with pytest.raises(DataError):
            read_audio(bad)
    with pytest.raises(DataError):
        read_audio(tmp_path)  # a folder
    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(DataError, match="the file does not exist"):
        read_audio(tmp_path / "pipe.wav")
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan] * 500, np.float32), 16_000, subtype="FLOAT")
    with pytest.raises(DataError, match="samples are not finite"):
        read_audio(tmp_path / "nan.wav")


def test_a_folder_with_a_manifest(tmp_path):
    (header, *lines) = (folder_of_tones(tmp_path, 11, rate=8_000) / "manifest.csv").read_text().split()
    splits = ["validation" if i in (4, 9) else "train" for i in range(11)]
    rows = [f"{header},split", *(f"{line},{split}" for line, split in zip(lines, splits, strict=True))]
    (tmp_path / "manifest.csv").write_text("\n".join(rows))
    found = speech(tmp_path, letters)
    assert (len(found.train), len(found.val)) == (9, 2) and found.window_s == 2.0 and not found.left_out
    assert found.val.names == ["4.wav", "9.wav"] and found.train.speakers[:3] == ["s0", "s1", "s0"]
    by_speaker = Stream(found.train, 2, batch_size=2, partitioner="shards:1")
    speakers = [{found.train.speakers[i] for i in by_speaker.indices(node, 0)[0]} for node in (0, 1)]
    assert speakers == [{"s0"}, {"s1"}] or speakers == [{"s1"}, {"s0"}]
    audio, labels = found.train.take(torch.tensor([2, 0]))
    assert audio.shape == (2, 32_000) and audio.dtype == torch.float32 and labels.dtype == torch.int64
    assert torch.equal(audio[1, :8_000], found.train.clip(0)) and not audio[1, 8_000:].any()
    assert labels[1].tolist() == [*letters("one", 0.5), *[-100] * (labels.shape[1] - 3)]
    batch = next(iter(Stream(found.train, 2, batch_size=2).batches(0, 0, 1)))
    assert batch[0].shape == (2, 32_000) and batch[1].shape == (2, 5)


def test_a_fifth_is_held_out_whatever_the_order_of_the_list(tmp_path):
    """People who each say the same ten words: every fifth clip would be of two words, which nobody learns then."""
    words = [chr(ord("a") + i % 10) for i in range(30)]
    found = speech(folder_of_tones(tmp_path, 30, words), letters)
    assert (len(found.train), len(found.val)) == (24, 6)
    assert set(found.train.texts) == set(words) and len(set(found.val.texts)) > 2
    assert set(found.train.speakers) == set(found.val.speakers) == {"s0", "s1"}
    assert speech(tmp_path, letters).val.names == found.val.names
    assert not set(found.train.names) & set(found.val.names)


PEOPLE = ("george", "jackson", "lucas")
RATES, KINDS = (8_000, 11_025, 22_050, 44_100, 48_000), ("wav", "flac", "ogg")


def digits(folder, name):
    """Write ten clips of each of three people, of all rates and kinds, mono and stereo; yield what a list says."""
    for i in range(30):
        rate, who, digit = RATES[i % 5], PEOPLE[i // 10], i % 10
        path = name.format(who=who, digit=digit, kind=KINDS[i % 3])
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / path, np.stack([tone(0.2 + 0.05 * digit, rate)] * (1 + i % 2), axis=1), rate)
        yield path, digit, who


@pytest.mark.parametrize(
    ("list_name", "columns", "place"),
    [
        ("manifest.csv", ("filename", "digit", "speaker"), "{who}/{digit}.{kind}"),
        ("digits.jsonl", ("Audio_File", "label", "speaker_name"), "{digit}_{who}.{kind}"),
        ("list of all.tsv", ("File Path", "Word", "Speaker-ID"), "a b/{who} {digit}.{kind}"),
        ("validated.tsv", ("path", "sentence", "client_id"), "clips/{digit}_{who}.{kind}"),
    ],
)
def test_spoken_digits_of_several_people_as_people_keep_them(tmp_path, list_name, columns, place):
    rows = list(digits(tmp_path, place))
    if list_name.startswith("validated"):  # Common Voice leaves out the folder of the clips
        rows = [(path.removeprefix("clips/"), digit, who) for path, digit, who in rows]
    mark = "\t" if list_name.endswith("tsv") else ","
    if list_name.endswith("jsonl"):
        lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    else:
        lines = [mark.join(columns), *(mark.join(map(str, row)) for row in rows)]
    (tmp_path / list_name).write_text("\n".join(lines) + "\n")
    found = speech(tmp_path, letters)
    assert not found.left_out and (len(found.train), len(found.val)) == (24, 6)
    assert set(found.train.texts) == set("0123456789") and set(found.train.speakers) == set(PEOPLE)
    for clips in (found.train, found.val):
        assert np.allclose(clips.seconds, [0.2 + 0.05 * int(text) for text in clips.texts], atol=0.05)


def test_a_folder_may_be_copied_to_another_place(tmp_path):
    """Names from the root of one computer on, and from above the folder, hold in a folder of the same name."""
    first = folder_of_tones(tmp_path / "here" / "speech", 6)
    text = (first / "manifest.csv").read_text()
    for before in (f"{first}/", "speech/", "C:/Users/ann/speech/"):
        (first / "manifest.csv").write_text("".join(
            line if number == 0 else before + line for number, line in enumerate(text.splitlines(keepends=True))
        ))  # fmt: skip
        there = shutil.copytree(first, tmp_path / "there" / "speech", dirs_exist_ok=True)
        paths = [entry.audio for entry in read_manifest(there / "manifest.csv")]
        assert [path.resolve() for path in paths] == [there / f"{i}.wav" for i in range(6)]
    with pytest.raises(DataError, match="outside the manifest's folder"):
        read_manifest(shutil.copytree(first, tmp_path / "there" / "other") / "manifest.csv")


def test_of_two_lists_none_is_taken(tmp_path):
    folder_of_tones(tmp_path, 6)
    (tmp_path / "manifest.csv").rename(tmp_path / "a.csv")
    assert len(speech(tmp_path, letters).train) == 5
    shutil.copy(tmp_path / "a.csv", tmp_path / "b.csv")
    with pytest.raises(DataError, match="has no manifest"):
        speech(tmp_path, letters)


def test_clips_are_thinned_evenly(tmp_path):
    clips = speech(folder_of_tones(tmp_path, 11), letters).train
    some = clips.thinned(3)
    assert some.names == [clips.names[i] for i in (0, 3, 6)] and some.window_s == clips.window_s
    for at, i in enumerate((0, 3, 6)):
        audio, labels = some[at]
        assert torch.equal(audio, clips[i][0]) and labels[labels >= 0].tolist() == letters(clips.texts[i], 1)
    assert clips.thinned(9) is clips


def manifest_texts(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(entry.audio.name, entry.text, entry.speaker, entry.held_out) for entry in read_manifest(folder / name)]


def test_manifests_of_all_kinds_say_the_same(tmp_path):
    want = [("a.wav", "one, two", "ann", False), ("sub b.flac", "drei vier", "", True)]
    texts = {
        "a.csv": 'audio,text,speaker,split\na.wav,"one, two",ann,train\nsub b.flac,drei vier,,validation\n',
        "b.csv": "\ufefffile_name;Sentence;speaker;split\r\na.wav;one, two;ann;train\r\nsub b.flac;drei vier;;test\r\n",
        "c.tsv": "path\tsentence\tclient_id\tsplit\na.wav\tone, two\tann\ttrain\n\nsub b.flac\tdrei vier\t\tdev\n",
        "d.csv": "wav|transcription|speaker|subset\na.wav|one, two|ann|train\nsub b.flac|drei vier||eval\n",
        "e.jsonl": '{"audio_filepath": "a.wav", "text": "one, two", "speaker": "ann", "split": "train"}\n\n'
        '{"audio_filepath": "sub b.flac", "text": "drei vier", "split": "val", "duration": 3}\n',
    }
    for name, content in texts.items():
        assert manifest_texts(tmp_path, name, content) == want, name
    (tmp_path / "validation.csv").write_text("audio,text\nsub b.flac,drei vier\n")
    assert manifest_texts(tmp_path, "train.csv", 'audio,text,speaker\na.wav,"one, two",ann\n') == want


HOSTILE = {
    "above": ("a.csv", "audio,text\n../x.wav,hello\n", "outside the manifest's folder"),
    "above, deeper": ("a.csv", "audio,text\nsub/../../x.wav,hello\n", "outside the manifest's folder"),
    "above, as Windows writes it": ("a.csv", "audio,text\n..\\x.wav,hello\n", "outside the manifest's folder"),
    "a drive": ("a.csv", "audio,text\nC:\\x.wav,hello\n", "outside the manifest's folder"),
    "absolute": ("a.jsonl", '{"audio": "/etc/passwd", "text": "root"}', "outside the manifest's folder"),
    "absolute, through a folder of our name": (
        "a.csv",
        "audio,text\n/x/../etc/passwd,hello\n",
        "outside the manifest's folder",
    ),
    "a split that is none": ("a.csv", "audio,text,split\na.wav,hello,fold3\n", "the split 'fold3' is unknown"),
    "no name": ("a.csv", "audio,text\n,hello\n", "names no file"),
    "no column": ("a.csv", "audoi,text\na.wav,hello\n", "no column 'audio': did you mean 'audoi'"),
    "a column that draws": ("a.csv", "\x1b]0;x\x07,text\na.wav,hello\n", r"line 2 has '\\x1b\]0;x\\x07', 'text', but"),
    "no header": ("a.csv", "", "lists no clip"),
    "a header alone": ("a.csv", "audio,text\n", "lists no clip"),
    "too many values": ("a.csv", "audio,text\na.wav,hello, you\n", "into quotes"),
    "no JSON": ("a.jsonl", "{'audio': 1}", "line 1 is not a JSON object"),
    "a list": ("a.jsonl", "[1]", "line 1 contains a list"),
    "deep": ("a.jsonl", "[" * 200_000, "line 1 is not a JSON object"),
    "no text": ("a.csv", b"\xff\xfe\x00", "cannot be read as a manifest"),
    "binary": ("a.csv", b"audio,text\na.wav,\0\n", "binary"),
    "one endless line": ("a.csv", "audio,text\n" + "a" * 1_100_000, "over 1,000,000 characters"),
    "an endless value": ("a.csv", "audio,text\na.wav," + "a" * 200_000, "field larger than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(tmp_path, name):
    file, content, message = HOSTILE[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path / file)


def test_an_absolute_name_in_the_folder_is_fine(tmp_path):
    assert manifest_texts(tmp_path, "m.csv", f"audio,text\n{tmp_path}/a.wav,hello\n") == [("a.wav", "hello", "", None)]


def test_a_huge_manifest_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "MOST_CLIPS", 1000)
    (tmp_path / "m.csv").write_text("audio,text\n" + "a.wav,hello\n" * 2000)
    with pytest.raises(DataError, match="more than 1,000 clips"):
        read_manifest(tmp_path / "m.csv")


def test_what_is_left_out_is_counted_and_said(tmp_path, capsys):
    texts = ["one", "two", "...", "", "five", "six", "seven", "eight", "n" * 500, "ten"]
    folder_of_tones(tmp_path, 10, texts)
    soundfile.write(tmp_path / "0.wav", tone(31), 16_000)
    soundfile.write(tmp_path / "1.wav", tone(0.05), 16_000)
    soundfile.write(tmp_path / "4.wav", np.zeros(16_000), 16_000)
    (tmp_path / "5.wav").write_bytes(b"\x1b]0;x\x07")
    (tmp_path / "6.wav").unlink()
    found = speech(tmp_path, letters)
    assert found.left_out == {
        "longer than 30 s": 1,
        "empty": 2,
        "without words": 2,
        "unreadable": 2,
        "with over 448 labels": 1,
    }
    assert found.train.texts + found.val.texts == ["eight", "ten"]
    said = capsys.readouterr().err
    assert "left out of 10 clips: 1 longer than 30 s (as 0.wav (31.0 s)), 2 empty (as 1.wav)" in said
    assert "\x1b" not in said and said.count("\n") == 1
    with pytest.raises(DataError, match="0 clips are left"):
        speech(tmp_path, letters, window_s=0.2)


def test_a_window_is_no_longer_than_asked_for(tmp_path):
    found = speech(folder_of_tones(tmp_path, 6), letters, window_s=0.8)
    assert found.left_out == {"longer than 0.8 s": 2} and found.train[0][0].shape == (12_800,)


def test_data_sets_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder_of_tones(tmp_path / "files", 6, rate=22_050)
    names = [str(tmp_path / "files" / f"{i}.wav") for i in range(6)]
    plain = datasets.Dataset.from_dict({"audio": names, "sentence": list("abcdef")})
    whole = plain.cast_column("audio", datasets.Audio())
    both = datasets.DatasetDict({"train": whole.select(range(4)), "test": whole.select(range(4, 6))})
    both.save_to_disk(tmp_path / "kept")
    for data in (both, str(tmp_path / "kept")):
        found = speech(data, letters)
        assert found.train.texts == list("abcd") and found.val.texts == list("ef")
        assert abs(found.train.seconds - [0.5, 0.6, 0.7, 0.8]).max() < 1e-3
    assert len(speech(whole, letters).train) == 5
    spoken = plain.remove_columns("sentence").add_column("label", [0, 1, 0, 1, 0, 1])
    spoken = spoken.cast_column("audio", datasets.Audio()).cast_column(
        "label", datasets.ClassLabel(names=["no", "yes"])
    )
    assert set(speech(spoken, letters).train.texts) == {"no", "yes"}
    rows = [{"audio": name, "digit": digit} for digit, name in enumerate(names)]
    assert not speech(rows, letters).left_out  # 0 is a text as well
    datasets.disable_progress_bars()


def test_rows_with_samples(tmp_path):
    rows = [{"audio": {"array": tone(0.5, 8_000), "sampling_rate": 8_000}, "text": "one"}] * 3
    rows += [{"audio": {"array": np.stack([tone(0.5)] * 2), "sampling_rate": 16_000}, "text": "two"}]
    found = speech({"train": rows[:3], "test": rows[3:]}, letters)
    assert found.train.seconds.tolist() == [0.5] * 3
    assert torch.allclose(found.val.clip(0), torch.from_numpy(tone(0.5)), atol=1e-4)
    with pytest.raises(DataError, match="clip 0 has 'noise', 'text', but no column 'audio'"):
        speech([{"noise": 1, "text": "x"}], letters)
    with pytest.raises(DataError, match="must be a folder"):
        speech(7, letters)
    with pytest.raises(DataError, match="0 clips are left"):
        speech([{"audio": 7, "text": "x"}] * 2, letters)


def test_where_speech_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EXOGYM_DATA", str(tmp_path / "data"))
    folder_of_tones(tmp_path / "cache" / "exogym" / "speech", 6)
    assert "cache" in find_speech(None, letters).origin
    folder_of_tones(tmp_path / "data" / "speech", 5)
    assert str(tmp_path / "data") in find_speech(None, letters).origin
    with pytest.raises(DataError, match="does not exist"):
        find_speech(tmp_path / "nowhere", letters)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"write a manifest.csv with the header 'audio,text'"):
        find_speech(tmp_path / "empty", letters)
    with pytest.raises(ArgumentError, match="did you mean 'window_s'"):
        speech(tmp_path, letters, windows_s=3)


def test_espeak_reads_lines_aloud(monkeypatch, tmp_path):
    train, val = lines_of_shakespeare(6, 2)
    assert (train, val) == lines_of_shakespeare(6, 2) and not set(train) & set(val)
    assert all(4 <= len(line.split()) <= 7 for line in train)
    rows = spoken(train[:5])
    assert len({row["speaker"] for row in rows}) == 4
    found = speech(rows, letters)
    assert (found.train.seconds > 0.5).all() and (found.train.seconds < 8).all()
    again = speech(spoken(train[:5]), letters)
    assert torch.equal(found.train.samples, again.train.samples)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExoGymError, match="apt-get install espeak-ng"):
        spoken(train[:1])


def test_json_manifest_values_may_be_anything(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        json.dumps({"audio": 3, "text": None}) + "\n" + json.dumps({"audio": ["x"], "text": 0})
    )
    assert [(e.name, e.text) for e in read_manifest(tmp_path / "m.jsonl")] == [("3", ""), ("['x']", "0")]
