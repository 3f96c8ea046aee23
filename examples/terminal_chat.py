"""A chat with a folder of documents, in the terminal and in one process. Ctrl-D ends it.

Run it as `python terminal_chat.py [folder]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from blendrag import BlendIndex

HANDBOOK = Path(__file__).parent / "handbook"


def main(documents: str | Path, folder: str) -> None:
    history: list[dict[str, str]] = []
    with BlendIndex.open(folder, similarity_top_k=2, max_tokens=100) as index:
        index.ingest(documents)
        index.start()
        print("Ask something, as in: When is the office in Bergen closed?")
        while True:
            try:
                question = input("\n> ").strip()
            except EOFError:
                return
            if not question:
                continue
            stream = index.stream(question, history=history[-4:])  # two turns: the window is small
            for piece in stream:
                print(piece, end="", flush=True)
            answer = stream.answer
            evidence = answer.evidence
            reused = [row for row in evidence.documents if row["kind"] == "cached"]
            print(
                f"\n[{len(reused)} documents reused: {evidence.reused} tokens as they are, "
                f"{evidence.recomputed} recomputed, {evidence.fresh} read as usual; "
                f"first token after {answer.ttft_s:.2f} s]"
            )
            history.append({"role": "user", "content": question})
            history.append({"role": "assistant", "content": answer.text})


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else HANDBOOK, folder)
