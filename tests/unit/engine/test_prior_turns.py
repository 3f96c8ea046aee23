"""Which prompts share blended KV in vLLM's prefix cache: those of one chat, and only where it is the same."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from blendrag.engine.client.prior_turns import PriorTurns
from blendrag.engine.wire.recipe import Recipe
from blendrag.options import BlendOptions

QUERY, HKVD = BlendOptions(selector="query"), BlendOptions(selector="hkvd")
DOCUMENT = (1, 2, 3, 4)
Turn = tuple[Recipe, tuple[int, ...]]
FIRST = Recipe("store", (("one", 1, 4),), QUERY)
ASKED = (0, *DOCUMENT, 5, 6)


def joined(ids: tuple[int, ...], recipe: Recipe = FIRST, key: str = "two") -> Turn:
    """The next turn of a chat, that another document has joined."""
    grown = (*ids, 7, 8, *DOCUMENT)
    return Recipe("store", (*recipe.spans, (key, len(ids) + 2, 4)), recipe.options), grown


def test_next_turn_of_a_chat_shares_the_kv_of_the_last() -> None:
    turns = PriorTurns()
    salt = turns.salt("", FIRST, ASKED)
    later = (*ASKED, 7, 8, 9)
    assert turns.salt("", FIRST, later) == turns.salt("", FIRST, (*later, 7)) == salt
    recipe, grown = joined(later)
    assert turns.salt("", recipe, (*grown, 9)) == salt
    assert turns.salt("", recipe, (*grown, 9, 9, 9)) == salt


def test_another_client_of_the_engine_shares_no_repair_for_its_own_question() -> None:
    """Under one salt, two of them would each take the other's for their own."""
    one, other = PriorTurns(alone=False), PriorTurns(alone=False)
    salt = one.salt("", FIRST, ASKED)
    assert other.salt("", FIRST, ASKED) == salt
    assert one.salt("", FIRST, (*ASKED, 7)) == salt
    recipe, grown = joined(ASKED)
    assert one.salt("", recipe, (*grown, 9)) != salt
    assert one.salt("", recipe, (*grown, 9)) != other.salt("", recipe, (*grown, 8))


def test_another_question_does_not_read_what_was_repaired_for_the_first() -> None:
    turns = PriorTurns()
    salt = turns.salt("", FIRST, ASKED)
    assert turns.salt("", FIRST, (*ASKED[:-1], 9)) != salt
    assert turns.salt("", FIRST, ASKED[:-1]) != salt
    recipe, grown = joined(ASKED)
    assert turns.salt("", recipe, (*grown, 9)) == salt
    assert turns.salt("", recipe, (*grown, 8)) != salt, "asked of the document that joined"
    another, _ = joined(ASKED, key="the same text from another source")
    assert turns.salt("", another, (*grown, 9)) != salt


def test_document_that_was_a_part_of_the_turn_before_is_not_taken_as_it_was() -> None:
    turns = PriorTurns()
    salt = turns.salt("", FIRST, ASKED)
    inside = Recipe("store", (*FIRST.spans, ("two", 5, 2)), QUERY)
    assert turns.salt("", inside, (*ASKED, 9)) != salt


def test_turns_of_another_namespace_or_of_other_options_are_not_taken_over() -> None:
    turns = PriorTurns()
    salt = turns.salt("a", FIRST, ASKED)
    assert turns.salt("b", FIRST, (*ASKED, 7)) not in (salt, salt.replace("a:", "b:"))
    assert turns.salt("a", Recipe("store", FIRST.spans, BlendOptions(0.3, "query")), (*ASKED, 7)) != salt
    traced = Recipe("store", FIRST.spans, BlendOptions(selector="query", trace=True))
    assert turns.salt("a", traced, (*ASKED, 7)) == salt


def test_memory_does_not_grow_with_every_prompt() -> None:
    turns = PriorTurns(most=3)
    for number in range(9):
        turns.salt("", FIRST, (*ASKED, number))
    recipe, grown = joined(ASKED)
    for number in range(9):
        turns.salt("", recipe, (*grown, number))
    assert len(turns._turns) == 3 >= len(turns._grown)


# Of a chat's turn: the turn that it goes on from, by number; the document that joins, if any; its question.
TURN = st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "b"]), st.sampled_from([(8,), (9,), (8, 9)]))


def chats(turns: list[tuple[int, str, tuple[int, ...]]], options: BlendOptions) -> Iterator[Turn]:
    """Prompts that begin alike."""
    made: list[Turn] = [(Recipe("store", (("a", 1, 4),), options), (0, *DOCUMENT))]
    for before, key, question in turns:
        recipe, ids = made[min(before, len(made) - 1)]
        if key:
            recipe = Recipe("store", (*recipe.spans, (key, len(ids), 4)), options)
            ids = (*ids, *DOCUMENT)
        made.append((recipe, (*ids, *question)))
        yield made[-1]


@given(st.lists(TURN, max_size=10), st.sampled_from([QUERY, HKVD]))
def test_two_kvs_of_the_same_tokens_have_two_salts(
    turns: list[tuple[int, str, tuple[int, ...]]], options: BlendOptions
) -> None:
    """A prefix cache in small: by salt and leading tokens, what a token's KV was computed with."""
    prior, cache = PriorTurns(), dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]()
    for recipe, ids in chats(turns, options):
        salt = prior.salt("", recipe, ids)
        tail = ids[recipe.cached_end :] if recipe.options == QUERY else ()
        hits = True
        for end in range(1, len(ids) + 1):
            at = salt, ids[:end]
            hits = hits and at in cache
            spans = tuple(span for span in recipe.spans if span[1] < end)
            chunk = next((key for key, start, length in spans if start < end <= start + length), "")
            if hits:
                found = cache[at]
                assert not chunk or found[0] == chunk, "another chunk's"
            else:
                cache[at] = chunk, tail
        asked = {cache[salt, ids[:end]][1] for _, s, n in recipe.spans for end in range(s + 1, s + n + 1)}
        for question in asked:
            begins = [ids[end : end + len(question)] for _, s, n in recipe.spans for end in [s + n]]
            assert question in begins, "repaired for a question that this prompt does not ask"


def test_prompt_whose_kv_is_evicted_shares_it_with_nobody() -> None:
    turns = PriorTurns()
    evicted = Recipe(FIRST.store, FIRST.spans, BlendOptions(selector="query", kv_budget=128))
    salts = {turns.salt("tenant", evicted, ASKED) for _ in range(3)}
    assert len(salts) == 3 and all(salt.startswith("tenant:") for salt in salts)
    assert turns.salt("tenant", evicted, (*ASKED, 7)) not in salts
    assert turns.salt("tenant", FIRST, (*ASKED, 7)) not in salts
