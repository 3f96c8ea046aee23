"""The plain data by which a request tells the engine of its exact prefix, and the orders made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PATH = "blendrag_path"  # the key in ``kv_transfer_params``
MIN_LOADED = 64  # tokens: computing fewer is faster, together with what is behind them


@dataclass(frozen=True, slots=True)
class PrefixPath:
    """A prompt's path in an opened tree.

    nodes: (key, end) from the root on; a node begins where the one before it ends. held: how many of the
    first nodes are stored, as far as the client knows: their KV is loaded. kept: nodes [held, kept) are
    stored once the engine has computed them. grows: nobody has asked this prompt: it is a part of one that
    may be asked. It does not count as a use of its nodes. state, kept_state: of hybrid models, the keys of
    the states behind the held nodes, which is loaded, and behind the kept ones, which is stored.
    """

    tree: str
    nodes: tuple[tuple[str, int], ...]
    held: int
    kept: int
    grows: bool = False
    state: str = ""
    kept_state: str = ""

    @property
    def held_end(self) -> int:
        return self.nodes[self.held - 1][1] if self.held else 0

    def start(self, node: int) -> int:
        return self.nodes[node - 1][1] if node else 0

    def parent(self, node: int) -> str:
        return self.nodes[node - 1][0] if node else ""

    def transfer_params(self, ticket: str) -> dict[str, Any]:
        """Return the value of ``SamplingParams.extra_args["kv_transfer_params"]``. ``ticket`` names the
        request."""
        return {PATH: asdict(self), "ticket": ticket}


def read_path(params: dict[str, Any] | None, prompt: int) -> PrefixPath | None:
    """Return the path in the ``kv_transfer_params`` of a request whose prompt has ``prompt`` tokens; None if
    there is none. Raises any exception for a broken one."""
    fields = (params or {}).get(PATH)
    if not fields:
        return None
    nodes = tuple((str(key), int(end)) for key, end in fields["nodes"])
    ends = [0, *(end for _, end in nodes)]
    held, kept, grows = int(fields["held"]), int(fields["kept"]), bool(fields.get("grows"))
    states = str(fields.get("state", "")), str(fields.get("kept_state", ""))
    path = PrefixPath(str(fields["tree"]), nodes, held, kept, grows, *states)
    if ends != sorted(set(ends)) or ends[-1] > prompt or not 0 <= path.held <= path.kept <= len(nodes):
        raise ValueError(f"no path through a prompt of {prompt} tokens: {path}")
    return path


@dataclass(slots=True)
class NodeLoad:
    """An order to load the first nodes of a request's path into its blocks.

    token_ids: all up to the last node's end; none: the engine has them already, and they only count as used.
    written: how many of the first tokens are there. use: whether this counts as a use. state: the key of the
    state behind the nodes, which goes into ``state_blocks``, one of each group of layers; "" where there are
    none.
    """

    request_id: str
    ticket: str
    tree: str
    nodes: Sequence[tuple[str, int]]
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    written: int
    use: bool = True
    state: str = ""
    state_blocks: Sequence[int] = ()


@dataclass(slots=True)
class NodeSave:
    """An order to store a node that the step at hand completes. token_ids, block_ids: all that is before its
    end. A state begins at its end: its blocks are those of the state there, one of each group of layers."""

    request_id: str
    tree: str
    key: str
    parent: str
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
