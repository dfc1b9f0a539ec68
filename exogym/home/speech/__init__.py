"""Speech: clips and their texts, from folders, Hugging Face data sets, or a program that speaks.

In this example two tones replace words, and the labels are letters:

>>> import io
>>> import numpy as np
>>> import soundfile
>>> def tone(hertz):
...     return np.sin(2 * np.pi * hertz * np.arange(16_000) / 16_000).astype(np.float32)
>>> rows = [{"audio": {"array": tone(220 * k), "sampling_rate": 16_000}, "text": "la"} for k in range(1, 6)]
>>> found: Speech = speech(rows, encode=lambda text, seconds: [ord(letter) for letter in text])
>>> clips: SpeechClips = found.train
>>> len(clips), len(found.val), found.window_s
(4, 1, 2.0)
>>> file = io.BytesIO()
>>> soundfile.write(file, tone(440), 16_000, format="WAV")
>>> samples, seconds = read_audio(file.getvalue())
>>> seconds, find_speech(rows, encode=lambda text, seconds: [1]).origin == found.origin
(1.0, True)
>>> train, held_out = lines_of_shakespeare(2, 1)
>>> read_aloud = spoken(train[:1], [Voice("en-us", speed=200)])  # by espeak-ng
>>> read_aloud[0]["text"] == train[0]
True
"""

from exogym.home.speech.audio import read_audio, resample
from exogym.home.speech.clips import Speech, SpeechClips, find_speech, speech
from exogym.home.speech.synthetic import VOICES, Voice, lines_of_shakespeare, spoken

__all__ = [
    "VOICES",
    "Speech",
    "SpeechClips",
    "Voice",
    "find_speech",
    "lines_of_shakespeare",
    "read_audio",
    "resample",
    "speech",
    "spoken",
]
