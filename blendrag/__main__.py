"""``python -m blendrag``: the command line."""

from blendrag.cli import main

main()
