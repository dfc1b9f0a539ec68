"""Whisper's input: log-mel spectrograms of sound."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exogym.errors import DataError

SAMPLE_RATE, FFT, HOP = 16_000, 400, 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
POSITIONS_PER_SECOND = FRAMES_PER_SECOND // 2  # the encoder's second convolution halves the frames
FULL_WINDOW_S = 30.0


class LogMel(nn.Module):
    """Log-mel spectrogram of 16 kHz sound, as Whisper was trained with (Radford et al. 2022).

    m = log10(max(M |STFT(x)|^2, 1e-10)), with a Hann window of 25 ms every 10 ms and M the mel filters of Slaney;
    then y = (max(m, max(m) - 8) + 4) / 4, with the clip's maximum.

    Args:
        n_mels: filters, 80 (128 for large-v3).

    >>> LogMel(80)(torch.zeros(2, 16_000)).shape
    torch.Size([2, 80, 100])
    """

    filters: Tensor
    window: Tensor

    def __init__(self, n_mels: int):
        super().__init__()
        self.register_buffer("filters", mel_filters(n_mels), persistent=False)
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)

    def forward(self, audio: Tensor) -> Tensor:
        """(batch, samples) in [-1, 1] -> (batch, n_mels, samples / 160).

        Raises:
            DataError: fewer samples than half a window.
        """
        if audio.shape[-1] <= FFT // 2:
            raise DataError(f"clips of {audio.shape[-1]} samples: a log-mel spectrogram needs more than {FFT // 2}")
        with torch.autocast(audio.device.type, enabled=False):
            padded = F.pad(audio.float(), (FFT // 2, FFT // 2), mode="reflect")
            spectrum = torch.stft(padded, FFT, HOP, window=self.window, center=False, return_complex=True)
            power = torch.view_as_real(spectrum[..., :-1]).square().sum(-1)
            mel = (self.filters @ power).clamp(min=1e-10).log10()
            return (mel.maximum(mel.amax((-2, -1), keepdim=True) - 8.0) + 4.0) / 4.0


def mel_filters(n_mels: int) -> Tensor:
    """Return (n_mels, 201): triangles, evenly spaced in mel from 0 to 8 kHz, each of area 1 (M. Slaney 1998).

    A mel is 200/3 Hz up to 1 kHz; above, 27 mels are a factor of 6.4.
    """
    top = _mel(SAMPLE_RATE / 2)
    edges = torch.tensor([_hertz(top * i / (n_mels + 1)) for i in range(n_mels + 2)], dtype=torch.float64)
    at = torch.linspace(0, SAMPLE_RATE / 2, FFT // 2 + 1, dtype=torch.float64)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((at - low) / (middle - low), (high - at) / (high - middle)).clamp(min=0)
    return (triangles * 2 / (high - low)).float()


def _mel(hertz: float) -> float:
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _hertz(mel: float) -> float:
    return 200 * mel / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)
