"""What a request tells the engine of its exact prefix, and what is ordered for it, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PATH = "blendrag_path"  # in ``kv_transfer_params``


@dataclass(frozen=True, slots=True)
class PrefixPath:
    """A prompt's path in an opened tree.

    nodes: (key, end) from the root on; a node begins where the one before it ends. held: how many of the
    first are there, as far as the client knows: their KV is loaded. kept: the nodes from ``held`` to here are
    stored when the engine has computed them. grows: nobody has asked this prompt, it is a part of one that
    may be asked: no use of its nodes, and not counted.
    """

    tree: str
    nodes: tuple[tuple[str, int], ...]
    held: int
    kept: int
    grows: bool = False

    @property
    def held_end(self) -> int:
        return self.nodes[self.held - 1][1] if self.held else 0

    def start(self, node: int) -> int:
        return self.nodes[node - 1][1] if node else 0

    def parent(self, node: int) -> str:
        return self.nodes[node - 1][0] if node else ""

    def transfer_params(self, ticket: str) -> dict[str, Any]:
        """For ``SamplingParams.extra_args["kv_transfer_params"]``; ``ticket`` names the request."""
        return {PATH: asdict(self), "ticket": ticket}


def read_path(params: dict[str, Any] | None, prompt: int) -> PrefixPath | None:
    """The path in the ``kv_transfer_params`` of a request whose prompt has so many tokens; None if there is
    none. Raises what it likes for a broken one."""
    fields = (params or {}).get(PATH)
    if not fields:
        return None
    nodes = tuple((str(key), int(end)) for key, end in fields["nodes"])
    ends = [0, *(end for _, end in nodes)]
    held, kept, grows = int(fields["held"]), int(fields["kept"]), bool(fields.get("grows"))
    path = PrefixPath(str(fields["tree"]), nodes, held, kept, grows)
    if ends != sorted(set(ends)) or ends[-1] > prompt or not 0 <= path.held <= path.kept <= len(nodes):
        raise ValueError(f"no path through a prompt of {prompt} tokens: {path}")
    return path


@dataclass(slots=True)
class NodeLoad:
    """The first nodes of a request's path, to be put into its blocks; the first ``written`` tokens are there.
    token_ids: all up to the last node's end; none: they are there, and were used. use: whether it is one."""

    request_id: str
    ticket: str
    tree: str
    nodes: Sequence[tuple[str, int]]
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    written: int
    use: bool = True


@dataclass(slots=True)
class NodeSave:
    """A node that the step at hand completes. token_ids, block_ids: of all that is before its end."""

    request_id: str
    tree: str
    key: str
    parent: str
    start: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
