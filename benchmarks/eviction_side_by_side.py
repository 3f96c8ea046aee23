"""Several replays in one picture: hit ratio against size.

    blendrag bench eviction --trace sgd_half.jsonl --sizes 8000,16000,32000 --json sgd.json
    python benchmarks/eviction_side_by_side.py "SGD=sgd.json" "ConvAI=convai.json" --out eviction.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from blendrag.replay.plot import draw_side_by_side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="TITLE=FILE", help="what bench eviction wrote")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    titled = (result.split("=", 1) for result in arguments.results)
    draw_side_by_side({title: json.loads(Path(file).read_text()) for title, file in titled}, arguments.out)


if __name__ == "__main__":
    main()
