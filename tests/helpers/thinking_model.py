"""The tests' model with a vocabulary and a template of models that think, such as Qwen3.

Two tokens that it does not use become the tags, so that its weights stay what they are.
"""

from __future__ import annotations

import json
from pathlib import Path

from one_engine import cut_model

_TOKENS = {"<jupyter_script>": "<think>", "<empty_output>": "</think>"}
_TEMPLATE = """\
{%- set said = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set said.last = loop.index0 %}{% endif %}{% endfor %}
{%- for tool in tools or [] %}<|im_start|>system
{{ tool | tojson }}<|im_end|>
{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > said.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}

</think>

{% endif %}{% endif %}"""


def thinking_model(folder: Path) -> Path:
    """Made in ``folder``. The template opens ``<think>``, and with ``enable_thinking=False`` closes it at
    once; it shows what was thought since the user spoke, and no earlier thinking."""
    model = folder / "thinking"
    model.mkdir()
    for file in cut_model().iterdir():
        (model / file.name).symlink_to(file)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if tag := _TOKENS.get(token["content"]):
            token.update(content=tag, special=False)
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {_TOKENS.get(word, word): number for word, number in words.items()}
    for name, text in (("tokenizer.json", json.dumps(tokenizer)), ("chat_template.jinja", _TEMPLATE)):
        (model / name).unlink()
        (model / name).write_text(text)
    return model
