"""Compute Whisper's input: log-mel spectrograms of sound."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exogym.errors import DataError, needs

SAMPLE_RATE, FFT, HOP = 16_000, 400, 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
POSITIONS_PER_SECOND = FRAMES_PER_SECOND // 2  # the encoder's second convolution halves the frames
FULL_WINDOW_S = 30.0


class LogMel(nn.Module):
    """Compute the log-mel spectrogram of 16 kHz sound, as in Whisper's training (Radford et al. 2022).

    The sound x gives m = log10(max(M |STFT(x)|^2, 1e-10)), with a Hann window of 25 ms every 10 ms and Slaney's mel
    filters M. The result is y = (max(m, m_max - 8) + 4) / 4, where m_max is the largest m of the clip.

    Args:
        n_mels: number of mel filters, 80 or (for large-v3) 128.

    >>> LogMel(80)(torch.zeros(2, 16_000)).shape
    torch.Size([2, 80, 100])
    """

    filters: Tensor
    window: Tensor

    def __init__(self, n_mels: int):
        super().__init__()
        bank = needs("transformers.audio_utils", "whisper").mel_filter_bank
        filters = bank(FFT // 2 + 1, n_mels, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        self.register_buffer("filters", torch.from_numpy(filters.T.copy()).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)

    def forward(self, audio: Tensor) -> Tensor:
        """Return the spectrograms, (batch, n_mels, samples / 160), of `audio` (batch, samples) in [-1, 1].

        Raises:
            DataError: a clip is not longer than half a Hann window (200 samples).
        """
        if audio.shape[-1] <= FFT // 2:
            raise DataError(f"clips have {audio.shape[-1]} samples: a log-mel spectrogram needs more than {FFT // 2}")
        with torch.autocast(audio.device.type, enabled=False):
            padded = F.pad(audio.float(), (FFT // 2, FFT // 2), mode="reflect")
            spectrum = torch.stft(padded, FFT, HOP, window=self.window, center=False, return_complex=True)
            power = torch.view_as_real(spectrum[..., :-1]).square().sum(-1)
            mel = (self.filters @ power).clamp(min=1e-10).log10()
            return (mel.maximum(mel.amax((-2, -1), keepdim=True) - 8.0) + 4.0) / 4.0
