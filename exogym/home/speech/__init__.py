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
>>> both = mixed(found, found, share=0.2)  # for a model that must not forget the second data set
>>> len(both.train), len(both.val)
(5, 1)
>>> sample: GeneralSpeech = general_speech("spoken", encode=lambda text, seconds: [1])
>>> sample.texts[0][:7], len(sample.clips)
('Ask not', 4)
>>> read_aloud = spoken(train[:1], [Voice("en-us", speed=200)])  # by espeak-ng
>>> read_aloud[0]["text"] == train[0]
True
"""

from exogym.home.speech.audio import read_audio, resample
from exogym.home.speech.clips import Speech, SpeechClips, find_speech, mixed, speech
from exogym.home.speech.general import GeneralSpeech, general_speech
from exogym.home.speech.synthetic import STRANGER, VOICES, Voice, lines_of_shakespeare, spoken

__all__ = [
    "STRANGER",
    "VOICES",
    "GeneralSpeech",
    "Speech",
    "SpeechClips",
    "Voice",
    "find_speech",
    "general_speech",
    "lines_of_shakespeare",
    "mixed",
    "read_audio",
    "resample",
    "speech",
    "spoken",
]
