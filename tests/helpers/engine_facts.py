"""What an engine says of itself, for stand-ins of one that blends."""

from blendrag.engine.wire.operations import EngineFacts

FACTS = EngineFacts(
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="float32",
    vllm="0",
    threads=1,
    block_size=16,
    reason=None,
)
