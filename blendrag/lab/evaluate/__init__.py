"""Does blending keep the answers, for this model and these documents? ``blendrag eval``."""
