"""What a user wishes for when a model is opened, and what was chosen for it: plain values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from tiercel.config import check_settings, setting
from tiercel.models.families import EMBEDDED


@dataclass(frozen=True)
class Wish:
    """Which model, where it runs, and how its entries are kept. Whatever is None is chosen."""

    model: str = EMBEDDED
    """A folder, a name of the Hugging Face Hub, or the name of a model (`families.FOLDERS`)."""
    _: KW_ONLY
    page_tokens: int | None = setting(None, "Tokens of one page.", least=1, otherwise="256; tiny-v4: 128")
    """None: 128 for the embedded model, whose texts are short, else 256."""
    format: str | None = setting(
        None, "How entries are kept: fp32, bf16, fp8.", otherwise="fp32 on a CPU, else the model's"
    )
    """How entries are kept. None: fp32 on a CPU, where nothing else is faster; else `Family.format`."""
    device: str = setting("cpu", "Where the model runs: cpu, cuda, cuda:1, …")
    """The torch device of weights, pages, tails and rings. The native kernels are for the CPU only."""
    kernels: str = setting("auto", "Kernels: auto, native (or a level: native:v3), cuda, reference.")
    compute: str = setting("auto", "Numbers that CUDA kernels compute with: bf16, or fp32.")
    """auto: fp32 on a CPU, bf16 on CUDA. Sums are fp32 everywhere."""
    exact: bool = setting(False, "Refuse to start if bits depend on the batch.", flag="--exact")
    """Refuse to start on kernels whose bits depend on the batch. False: the start table names them."""
    draft: str | None = setting(None, "A small model that guesses, with the same tokenizer: as MODEL.")
    """A model of any family. Its entries are part of every page and tail."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def tokens_of_page(self) -> int:
        """What was asked for, or chosen."""
        return self.page_tokens or (128 if self.model == EMBEDDED else 256)

    @property
    def on_cpu(self) -> bool:
        return self.device.partition(":")[0] == "cpu"


@dataclass(frozen=True)
class Choice:
    """One line of what was chosen, and why."""

    what: str
    value: str
    why: str
