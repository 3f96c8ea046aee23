"""Documents that tools answer with, as JSON, under the chat templates of the models that agents use.

The templates are ours, after the formats that the models' makers document, cut to what a tool's answer
passes through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from blendrag.prompt import Recogniser, Sightings, encode_document, plan_chat, plan_prompt, render_chat
from blendrag.prompt.plan import PromptPlan
from prompt_shapes import DOCUMENTS

OUTPUT = "({'output': m.content} if m.content is string else m.content)"
LLAMA = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    f"{{% if m.role == 'tool' %}}{{{{ {OUTPUT} | tojson }}}}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
TEMPLATES = {
    "Llama 3.1, 3.3": LLAMA,
    "Llama 3.1, its content as JSON": LLAMA.replace(OUTPUT, "m.content"),
    "Qwen 3": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
        "\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
        "<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ),
    "gpt-oss": (
        "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.search to=assistant"
        "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.tool_calls %}<|start|>assistant to=functions.search<|channel|>commentary json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "<|start|>assistant"
    ),
    "Mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS] [{{ m.tool_calls[0].function | tojson }}]</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | string }}, "
        "\"call_id\": \"123456789\"}[/TOOL_RESULTS]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "Gemma": (
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{% if m.role == 'tool' %}```tool_output\n{{ m.content | trim }}\n```"
        "{% else %}{{ m.content | trim }}{% endif %}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
    ),
    "Hermes": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}<tool_response>\n"
        "{\"name\": \"search\", \"content\": {{ m.content | tojson }}}\n</tool_response>"
        "{% elif m.tool_calls %}<tool_call>\n{{ m.tool_calls[0].function | tojson }}\n</tool_call>"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
}  # fmt: skip

ANSWERS: dict[str, Callable[[list[str]], str]] = {
    "rows": lambda texts: json.dumps([{"id": at, "content": text} for at, text in enumerate(texts)]),
    "rows, Unicode": lambda texts: json.dumps([{"text": one} for one in texts], ensure_ascii=False),
    "rows, indented": lambda texts: json.dumps([{"content": text, "score": 0.5} for text in texts], indent=2),
    "joined": "\n\n".join,
}  # fmt: skip


def conversation(answer: str, question: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": question}}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": "That is all that I have found."},
        {"role": "user", "content": f"So, what of it? I asked this: {question}"},
    ]


def keep(known: Recogniser, tokenizer: Any, texts: list[str]) -> None:
    for text in texts:
        known.add(f"{len(known)}", text, encode_document(tokenizer, text))


def as_server(tokenizer: Any, known: Recogniser, messages: list[dict[str, Any]]) -> PromptPlan:
    return plan_prompt(render_chat(tokenizer, messages), tokenizer, known)


def as_embedded(tokenizer: Any, known: Recogniser, messages: list[dict[str, Any]]) -> PromptPlan:
    return plan_chat(messages, tokenizer, known)


@pytest.mark.parametrize("planned", [as_server, as_embedded])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_ingested_documents_are_reused_from_the_second_prompt_on(
    template: str, answer: Any, planned: Any, with_template: Callable[[str], Any]
) -> None:
    tokenizer, texts = with_template(template), list(DOCUMENTS.values())
    known = Recogniser(tokenizer)
    keep(known, tokenizer, texts)
    first = planned(tokenizer, known, conversation(answer(texts), "How long is the warranty?"))
    keep(known, tokenizer, [form.text for form in first.forms])
    second = planned(tokenizer, known, conversation(answer(texts[::-1]), "What is a tyre?"))
    forms = {segment.text for segment in second.cached_segments}
    assert len(forms) == len(texts), "each document, whole"
    tokens = sum(len(encode_document(tokenizer, text)) for text in forms)
    assert second.cached_tokens >= 0.9 * tokens and second.text == render_chat(
        tokenizer, conversation(answer(texts[::-1]), "What is a tyre?")
    )


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_documents_that_nobody_has_named_are_reused_from_the_third_prompt_on(
    template: str, answer: Any, with_template: Callable[[str], Any]
) -> None:
    tokenizer, texts = with_template(template), [f"{text}\n{text[::-1]}" for text in DOCUMENTS.values()]
    known, sightings = Recogniser(tokenizer), Sightings(tokenizer, 512)
    for question, order in (("How long?", texts), ("And why?", texts[::-1])):
        plan = as_server(tokenizer, known, conversation(answer(order), question))
        keep(known, tokenizer, sightings.note(plan))
    order = [texts[1], texts[3], texts[0], texts[2]]
    third = as_server(tokenizer, known, conversation(answer(order), "What else?"))
    said = len(encode_document(tokenizer, answer(order)))
    assert third.cached_tokens > 0.8 * said
