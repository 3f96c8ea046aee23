"""What a replayed request would have taken: seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from blendrag.control.estimate import PrefillCurve
from blendrag.control.profile import Profile
from blendrag.errors import SourceError


def _modelled() -> PrefillCurve:
    """Llama-3.1-8B on an A100 at half its 312 TFLOPS: 16 GFLOP a token, 0.52 MFLOP a pair that attends."""
    return PrefillCurve((0.0, 1.0e-4, 3.4e-9), (0,), (1,), ((1.0,),))


@dataclass(frozen=True, slots=True)
class Costs:
    """Of prefill, T(cached, fresh), and of moving KV.

    T is a grid of measurements, bilinear between them (RAGCache, section 5.1; see :class:`PrefillCurve`).
    The defaults are not measured: they give an idea, and an order. bytes_per_token: KV, all layers (the
    default: of Llama-3.1-8B in 16 bits). bytes_per_s: at which held KV is loaded (RAM over PCIe 4).
    """

    prefill: PrefillCurve = field(default_factory=_modelled)
    bytes_per_token: int = 131_072
    bytes_per_s: float = 20e9

    @classmethod
    def of_profile(cls, path: Path, bytes_per_token: int = 131_072) -> Costs:
        """As ``blendrag profile`` measured them; KV comes from its fastest tier. Raises SourceError."""
        try:
            profile = Profile.model_validate_json(path.read_bytes())
        except OSError as error:
            raise SourceError(f"cannot read {str(path)!r}: {error.strerror}") from error
        except ValidationError as error:
            raise SourceError(f"{str(path)!r} is no profile as blendrag profile writes it") from error
        fastest = max(tier.bytes_per_s for tier in profile.tiers.values())
        return cls(PrefillCurve.fit(profile.prefill), bytes_per_token, fastest)

    def per_token_s(self, cached: int, fresh: int) -> float | None:
        """Cost_i / NewSize_i of a request (RAGCache eq. 3); None where nothing is computed."""
        return self.prefill.seconds(cached, fresh) / fresh if fresh > 0 else None

    def ttft_s(self, cached: int, fresh: int) -> float:
        """Time to the first token: loading what was found, then computing the rest."""
        return cached * self.bytes_per_token / self.bytes_per_s + self.prefill.seconds(cached, fresh)
