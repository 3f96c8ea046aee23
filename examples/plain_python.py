"""No framework: a folder of documents is ingested, and questions are asked."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from blendrag import Answer, BlendIndex

HANDBOOK = Path(__file__).parent / "handbook"
QUESTION = "What is the limit of a company card?"


def show(answer: Answer) -> None:
    evidence = answer.evidence
    reused = [row for row in evidence.documents if evidence.plain is None and row["kind"] == "cached"]
    print(answer.text)
    print(
        f"[{len(reused)} documents reused: {evidence.reused} tokens as they are, "
        f"{evidence.recomputed} recomputed, {evidence.fresh} read as usual; "
        f"first token after {answer.ttft_s:.2f} s]"
    )


def main(folder: str) -> None:
    # In a program of your own, take a folder that stays: the next run then has nothing to prefill.
    with BlendIndex.open(folder, similarity_top_k=2, max_tokens=60) as index:
        report = index.ingest(HANDBOOK, progress=False)
        print(f"{report.added} documents, {report.tokens:,} tokens prefilled in {report.prefill_s:.1f} s")

        print(f"\n{QUESTION}")
        show(index.ask(QUESTION))
        print("\nThe same without blending, which reads everything:")
        show(index.ask(QUESTION, blend=False))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
