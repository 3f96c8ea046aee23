from __future__ import annotations

from typing import Any

import pytest

from blendrag.prompt import KnownText, Recogniser, encode_document


@pytest.fixture(scope="session")
def sentencepiece_like() -> Any:
    """A tokenizer built the Llama-2 way: a blank is put before every text, and BOS before that."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", "▁", "\n", *map(chr, range(33, 127))]
    core = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def ingested(tokenizer: Any) -> list[KnownText]:
    """Five chunks; the last two begin with the same heading."""
    heading = "Staff handbook, third edition, in force since January. "
    texts = [
        "Travel is approved by the head of the department. Flights are booked two weeks ahead, and "
        "receipts are handed in within ten days of the return. Taxis need a reason in writing.",
        "The canteen serves lunch from noon to two. Vegetarian dishes are marked green; whoever has an "
        "allergy asks for the list of ingredients at the counter. Prices rise in März – see 第三章 😀.",
        "A laptop is replaced every four years. Lost devices are reported to the help desk at once, "
        "which locks them; the owner files a statement with the insurance within three days.",
        heading + "Holidays are thirty days a year. What is left in March of the following year expires, "
        "unless the department could not do without the person.",
        heading + "Parental leave is announced seven weeks before it begins, in writing, to the person "
        "one reports to and to the personnel department, which answers within a week.",
    ]
    return [
        KnownText(text, encode_document(tokenizer, text), f"key{at}", f"doc{at}.md")
        for at, text in enumerate(texts)
    ]


@pytest.fixture
def recogniser(tokenizer: Any, ingested: list[KnownText]) -> Recogniser:
    filled = Recogniser(tokenizer, min_tokens=8)
    for known in ingested:
        filled.add(known.key, known.text, known.token_ids, known.source)
    return filled
