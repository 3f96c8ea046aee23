"""Every name of vLLM that blendrag uses: no other package imports vLLM. For which versions, says
``engine/client/requirement.py``.

Outside of vLLM's own processes these modules are imported when an engine is wanted: it takes seconds.
"""

import logging

# Torch warns where there is no Triton; so it is on every CPU.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
