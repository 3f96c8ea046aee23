"""Every way in which LangChain puts documents into prompts, with LangChain itself, Chroma and our own model;
only the engine is stood in for. ``UPDATE_PROMPTS=1`` writes the prompts anew; ``-rP`` shows the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import AgentState
from langchain.agents.middleware import AgentMiddleware, ModelRequest, dynamic_prompt
from langchain_classic.chains import RetrievalQA, create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import EnsembleRetriever, MultiQueryRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool

from langchain_blendrag import BlendChroma, ChatBlend
from langchain_rig import ANSWER, Placed, Rig, format_docs
from prompt_shapes import DOCUMENTS, QUESTION, Shape, Shapes
from scripted_engine import Scripted

pytestmark = pytest.mark.filterwarnings("error::blendrag.errors.BlendragWarning")

SHAPES = Shapes("LangChain", __file__)
shape = SHAPES.shape

TEMPLATE = """Answer the question based only on the following context:
{context}

Question: {question}
"""
USE_CONTEXT = (
    "Use the given context to answer the question. If you don't know the answer, say you don't know. Use "
    "three sentence maximum and keep the answer concise. Context: {context}"
)


@pytest.fixture
def rig(make: Callable[..., ChatBlend], speaker: Scripted) -> Rig:
    llm, speaker.answers = make(min_cached_tokens=1), [ANSWER]
    store = BlendChroma("recognition", Placed(), llm=llm, collection_metadata={"hnsw:space": "ip"})
    store.reset_collection()
    metadatas = [{"source": f"{name}.md"} for name in DOCUMENTS]
    store.add_texts([*DOCUMENTS.values()], metadatas, [f"d{name}" for name in DOCUMENTS])
    return Rig(llm, store, speaker)


# -- LCEL ----------------------------------------------------------------------------------------------------


@shape("LCEL, `ChatPromptTemplate`", "1 2 3")
def lcel(rig: Rig) -> None:
    assert rig.lcel(ChatPromptTemplate.from_template(TEMPLATE)).invoke(QUESTION) == ANSWER


@shape("LCEL, streamed, async", "1 2 3", like="lcel")
def lcel_astream(rig: Rig) -> None:
    async def stream() -> str:
        chain = rig.lcel(ChatPromptTemplate.from_template(TEMPLATE))
        return "".join([piece async for piece in chain.astream(QUESTION)])

    assert asyncio.run(stream()) == ANSWER


@shape("LCEL, `PromptTemplate` (a string)", "1 2 3")
def lcel_string_prompt(rig: Rig) -> None:
    rig.lcel(PromptTemplate.from_template("Context: {context}\nQ: {question}\nA:")).invoke(QUESTION)


@shape("LCEL, jinja2 template", "1 2 3")
def lcel_jinja2(rig: Rig) -> None:
    template = (
        "{% for d in context %}[{{ d.metadata.source }}]\n{{ d.page_content }}\n{% endfor %}{{ question }}"
    )
    prompt = PromptTemplate.from_template(template, template_format="jinja2")
    rig.lcel(prompt, context=rig.retriever()).invoke(QUESTION)


@shape("LCEL, mustache template, `{{{context}}}`", "1 2 3")
def lcel_mustache(rig: Rig) -> None:
    template = "Context: {{{context}}}\nQuestion: {{question}}"
    rig.lcel(ChatPromptTemplate.from_template(template, template_format="mustache")).invoke(QUESTION)


@shape("LCEL, mustache template, `{{context}}`", "1 2 3", found="", escaped=True)
def lcel_mustache_escaped(rig: Rig) -> None:
    template = "Context: {{context}}\nQuestion: {{question}}"
    rig.lcel(ChatPromptTemplate.from_template(template, template_format="mustache")).invoke(QUESTION)


@shape("LCEL, `format_docs` forgotten", "1 2 3", found="", escaped=True)
def lcel_list_of_documents(rig: Rig) -> None:
    rig.lcel(ChatPromptTemplate.from_template(TEMPLATE), context=rig.retriever()).invoke(QUESTION)


@shape("LCEL, `MessagesPlaceholder`: a document in the history and again", "1 2 1 3")
def lcel_history(rig: Rig) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You answer from documents."), MessagesPlaceholder("history"), ("human", TEMPLATE)]
    )
    earlier = TEMPLATE.format(context=f"{DOCUMENTS['1']}\n\n{DOCUMENTS['2']}", question="1, 2?")
    history = [HumanMessage(earlier), AIMessage(ANSWER)]
    rig.lcel(prompt.partial(history=history), rig.retriever(2) | format_docs).invoke("1 3")


@shape("LCEL, two searches joined: a document twice in one message", "1 2 2 3")
def lcel_two_searches(rig: Rig) -> None:
    def search_both(question: str) -> str:
        found = [rig.retriever(2).invoke(part) for part in question.split("/")]
        return "\n\n".join(map(format_docs, found))

    rig.lcel(ChatPromptTemplate.from_template(TEMPLATE), RunnableLambda(search_both)).invoke("1 2 / 2 3")


# -- chains --------------------------------------------------------------------------------------------------


@shape("`create_retrieval_chain`", "1 2 3")
def retrieval_chain(rig: Rig) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", USE_CONTEXT), ("human", "{input}")])
    chain = create_retrieval_chain(rig.retriever(), create_stuff_documents_chain(rig.llm, prompt))
    assert chain.invoke({"input": QUESTION})["answer"] == ANSWER


@shape("`create_retrieval_chain`, own `document_prompt` and separator", "1 2 3")
def retrieval_chain_document_prompt(rig: Rig) -> None:
    stuff = create_stuff_documents_chain(
        rig.llm,
        ChatPromptTemplate.from_messages([("system", USE_CONTEXT), ("human", "{input}")]),
        document_prompt=PromptTemplate.from_template("[{source}] {page_content}"),
        document_separator="\n---\n",
    )
    create_retrieval_chain(rig.retriever(), stuff).invoke({"input": QUESTION})


@shape("`create_history_aware_retriever`, second turn", "2 1 3")
def history_aware_chain(rig: Rig) -> None:
    rig.engine.answers = ["And what do 2, 1 and 3 say?", ANSWER]
    rephrase = ChatPromptTemplate.from_messages(
        [
            MessagesPlaceholder("chat_history"),
            ("human", "{input}"),
            ("human", "Make it a standalone question."),
        ]
    )
    answer = ChatPromptTemplate.from_messages(
        [("system", USE_CONTEXT), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    retriever = create_history_aware_retriever(rig.llm, rig.retriever(), rephrase)
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(rig.llm, answer))
    chain.invoke({"input": "And those?", "chat_history": [HumanMessage(QUESTION), AIMessage(ANSWER)]})


def retrieval_qa(kind: str) -> None:
    """Registers a chain of this kind."""

    def run(rig: Rig) -> None:
        RetrievalQA.from_chain_type(rig.llm, chain_type=kind, retriever=rig.retriever()).invoke(QUESTION)

    run.__name__ = f"retrieval_qa_{kind}"
    shape(f"`RetrievalQA`, {kind}", "1 2 3")(run)


retrieval_qa("stuff")
retrieval_qa("refine")
retrieval_qa("map_reduce")


@shape("`EnsembleRetriever`", "1 2 3 4")
def ensemble_retriever(rig: Rig) -> None:
    both = EnsembleRetriever(retrievers=[rig.retriever(2), rig.retriever(4)], weights=[0.5, 0.5])
    rig.lcel(ChatPromptTemplate.from_template(TEMPLATE), both | format_docs).invoke(QUESTION)


@shape("`MultiQueryRetriever`", "3 4 1 2")
def multi_query_retriever(rig: Rig) -> None:
    rig.engine.answers = ["What do 3 and 4 say?\nWhat do 1 and 2 say?", ANSWER]
    several = MultiQueryRetriever.from_llm(rig.retriever(2), rig.llm)
    rig.lcel(ChatPromptTemplate.from_template(TEMPLATE), several | format_docs).invoke(QUESTION)


# -- agents --------------------------------------------------------------------------------------------------


@shape("agent, `content_and_artifact` tool of the tutorial", "1 2")
def agent_tutorial_tool(rig: Rig) -> None:
    rig.ask_agent([rig.tutorial_tool()], ["battery"])


@shape("agent that searches twice and finds a document again", "1 2 1 2 3 1")
def agent_searches_twice(rig: Rig) -> None:
    rig.ask_agent([rig.tutorial_tool()], ["1 2", "3 1"])


@shape("agent, `create_retriever_tool`", "1 2 3")
def agent_retriever_tool(rig: Rig) -> None:
    rig.ask_agent([create_retriever_tool(rig.retriever(), "retrieve", "Searches the manual.")], ["battery"])


@shape("agent, `create_retriever_tool`, own `document_prompt`, `content_and_artifact`", "1 2 3")
def agent_retriever_tool_artifact(rig: Rig) -> None:
    searching = create_retriever_tool(
        rig.retriever(),
        "retrieve",
        "Searches the manual.",
        document_prompt=PromptTemplate.from_template("<{source}>{page_content}</{source}>"),
        document_separator="\n",
        response_format="content_and_artifact",
    )
    rig.ask_agent([searching], ["battery"])


@shape("agent, `@dynamic_prompt` middleware", "1 2 3")
def agent_dynamic_prompt(rig: Rig) -> None:
    @dynamic_prompt
    def prompt_with_context(request: ModelRequest) -> str:
        documents = rig.retriever().invoke(request.state["messages"][-1].text)
        return (
            "You are a helpful assistant. Use the following context in your response:"
            f"\n\n{format_docs(documents)}"
        )

    rig.ask_agent([], middleware=[prompt_with_context])


@shape("agent, `before_model` middleware: question before the documents", "1 2 3")
def agent_before_model(rig: Rig) -> None:
    class State(AgentState[Any]):
        context: list[Document]

    class Retrieving(AgentMiddleware[State]):
        state_schema = State

        def before_model(self, state: State, runtime: Any) -> dict[str, Any]:
            last = state["messages"][-1]
            documents = rig.retriever().invoke(last.text)
            asked = f"{last.text}\n\nUse the following context to answer the query:\n{format_docs(documents)}"
            return {"messages": [last.model_copy(update={"content": asked})], "context": documents}

    rig.ask_agent([], middleware=[Retrieving()])


# -- the tests -----------------------------------------------------------------------------------------------


NAMES = {text: name for name, text in DOCUMENTS.items()}


@pytest.mark.parametrize("shape", SHAPES.all, ids=str)
def test_every_document_is_recognised_and_an_escaped_one_from_the_next_prompt_on(
    shape: Shape, rig: Rig
) -> None:
    SHAPES.check_run(shape, rig, rig.llm.chat.library, NAMES)


def test_table_in_the_documentation_is_what_was_measured() -> None:
    SHAPES.check_page()
