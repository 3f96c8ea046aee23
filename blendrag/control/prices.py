"""What storing KV costs (row CB-18): a price table that users edit, and the bill for a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml  # type: ignore[import-untyped]  # comes with pydantic-settings[yaml]
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendrag.errors import ConfigError

GB = 10**9
Price = Annotated[float, Field(ge=0)]
_MEDIUM = {"ram": "ram", "disk": "nvme", "redis": "ram", "object": "object"}


class Prices(BaseModel):
    """Per GB (10^9 bytes) and month. The defaults are an example, of the order of what clouds ask.

    tiers: the price of a tier by its label or kind ("disk", "redis", ...): a number, or the name of another
    price here, for a disk that is a network disk, say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    currency: str = "USD"
    ram: Price = 3.0
    nvme: Price = 0.12
    network_disk: Price = 0.08
    object: Price = 0.023
    tiers: dict[str, Price | str] = Field(default_factory=dict)

    def of(self, label: str) -> float | None:
        """The price of a tier, by its label as statistics show it; None for a kind nobody knows.

        Raises ConfigError if it refers to a price that is not in the table.
        """
        kind = label.split()[0]
        price = self.tiers.get(label, self.tiers.get(kind, _MEDIUM.get(kind)))
        if not isinstance(price, str):
            return price
        known = {name: getattr(self, name) for name in ("ram", "nvme", "network_disk", "object")}
        if price not in known:
            raise ConfigError(f"price of tier {label!r}: {price!r} is not one of {', '.join(known)}")
        return float(known[price])


def read_prices(path: Path) -> Prices:
    """A price table from a YAML file. Raises ConfigError, naming what is wrong."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the prices in {str(path)!r}: {error}") from error
    try:
        return Prices.model_validate(content or {})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"prices in {str(path)!r}: {name}: {first['msg']}".replace(": :", ":")) from error


def per_month(nbytes: int, price: float) -> float:
    """C_store for a month."""
    return nbytes / GB * price
