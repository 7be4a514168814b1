"""Work of a layer that runs beside the rest of the layer, on a second stream of a recorded forward.

    a stream of its own    ┌ keys, scores, best entries, hot rows ┐
    the forward's stream   ┴ queries, window, compressed entries  ┴ attention

The kernels of a decode step are short: they do not fill the device, and each of them waits for the one
before. Longer calls are not recorded. They fill the device, so they keep one stream.
"""

from __future__ import annotations

import torch


class Beside:
    """`with beside:` queues calls that run beside what is queued behind them, up to `join`.

    Tensors that these calls read must be kept until `join`. Those that they make may be used behind it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        """Made at the first recording."""
        self._inside: torch.cuda.StreamContext | None = None
        self._forked = False

    def __enter__(self) -> None:
        if self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._inside = torch.cuda.stream(self._stream)
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._inside is not None:
            self._inside.__exit__(*error)
            self._inside, self._forked = None, True

    def join(self) -> None:
        """What is queued from now on runs behind all of it."""
        if self._forked:
            assert self._stream is not None
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._forked = False
