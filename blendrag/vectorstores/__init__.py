"""Other programs' vector stores, scrolled through: one interface, one registry, a file for each kind."""

from blendrag.vectorstores.following import StoreReport, sync
from blendrag.vectorstores.interface import STORES, Address, Fields, VectorStore, text_of
from blendrag.vectorstores.opening import open_store

__all__ = ["STORES", "Address", "Fields", "StoreReport", "VectorStore", "open_store", "sync", "text_of"]
