"""The evaluation (``blendrag eval``): does blending keep the answers, for this model and these documents?"""
