"""Every name of vLLM that blendrag uses: no other package imports vLLM. ``engine/client/requirement.py`` says
which versions these modules are made for.

Outside of vLLM's own processes these modules are imported only when an engine is wanted: it takes seconds.
"""

import logging

# Torch warns where there is no Triton, as on every CPU.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
