from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.eviction.heap import IndexedHeap

_PUSHES = st.tuples(st.just("push"), st.sampled_from("abcdefghijkl"), st.integers(0, 5))
_TAKES = st.tuples(st.sampled_from(("remove", "pop")), st.sampled_from("abcdefghijkl"), st.just(0))


@settings(deadline=None)
@given(st.lists(_PUSHES | _TAKES, max_size=60))
def test_heap_and_a_sorted_list_never_disagree(calls: list[tuple[str, str, int]]) -> None:
    heap = IndexedHeap()
    model: dict[str, tuple[float, int]] = {}
    for turn, (call, key, priority) in enumerate(calls):
        if call == "push":
            heap.push(key, priority)
            model[key] = (priority, turn)
        elif call == "remove":
            assert heap.remove(key) == (model.pop(key, None) is not None)
        elif model:
            first = min(model, key=lambda key: model[key])
            assert heap.pop() == (first, model.pop(first)[0])
        assert len(heap) == len(model)
        first = min(model, key=lambda key: model[key], default="")
        assert heap.peek() == ((first, model[first][0]) if model else None)
        assert all(heap.priority(key) == model[key][0] for key in model)
        assert (key in heap) == (key in model)
    assert [heap.pop()[0] for _ in model] == sorted(model, key=lambda key: model[key])
