"""The planning of prompts from messages: render, recognise what was ingested, tokenise each segment apart."""

from blendrag.prompt.assemble import assemble, turn_of
from blendrag.prompt.plan import DocumentNote, Form, PromptPlan, Segment
from blendrag.prompt.planner import plan_chat, plan_prompt
from blendrag.prompt.prefix import shared_prefix, start_prefix
from blendrag.prompt.recognise import KnownText, Match, Recogniser
from blendrag.prompt.repeats import Sightings
from blendrag.prompt.template import Messages, decode, encode_document, passed_over, render_chat

__all__ = [
    "DocumentNote",
    "Form",
    "KnownText",
    "Match",
    "Messages",
    "PromptPlan",
    "Recogniser",
    "Segment",
    "Sightings",
    "assemble",
    "decode",
    "encode_document",
    "passed_over",
    "plan_chat",
    "plan_prompt",
    "render_chat",
    "shared_prefix",
    "start_prefix",
    "turn_of",
]
