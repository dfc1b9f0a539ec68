"""Speech: clips with what is said in them, from folders, data sets of Hugging Face, or a program that speaks."""

from exogym.data.speech.audio import read_audio, resample
from exogym.data.speech.clips import Speech, SpeechClips, find_speech, speech
from exogym.data.speech.synthetic import STRANGER, VOICES, Voice, lines_of_shakespeare, spoken

__all__ = [
    "STRANGER",
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
