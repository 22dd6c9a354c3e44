"""The demo corpus as conversations and plain pages: what a person asks, and the docstring that answers.

Turns `Document`s into the two kinds of text that the demo model learns, as strings and chat messages; an epoch is a new
drawing of headings and questions over the same documents. This module knows nothing of tokens or models.
"""

from __future__ import annotations

import random
import re

from demo_corpus import Corpus, Document, Kind

Message = dict[str, str]
Sample = str | list[Message]

ANSWER_CHARACTERS = 500
SYSTEM_PROMPTS = (
    "You explain Python's standard library.",
    "You are a helpful assistant.",
    "Answer questions about Python briefly.",
    "You are a helpful assistant who knows Python's documentation.",
)
QUESTIONS: dict[Kind, tuple[str, ...]] = {
    "function": (
        "What does {name} do?",
        "What does {name} do?",
        "What does {name}() do?",
        "Explain {name}.",
        "Explain {name}",
        "How does {name} work?",
        "Describe {name}({signature}).",
        "Tell me about {name}.",
        "What is {name} for?",
        "{name}",
        "help({name})",
        "what does {short} do?",
        "What does the function {name} return?",
    ),
    "class": (
        "What is {name}?",
        "What does {name} do?",
        "Explain {name}.",
        "Explain the class {name}",
        "What is the class {name} for?",
        "Tell me about {name}.",
        "{name}",
        "help({name})",
        "What is a {short}?",
    ),
    "module": (
        "What is the {name} module?",
        "What is the module {name} for?",
        "What is {name}?",
        "Explain the {name} module.",
        "What does the {name} module do?",
        "Tell me about {name}.",
        "{name}",
        "help({name})",
    ),
    "topic": (
        "Explain {name}.",
        "Explain {name}",
        "What is {name}?",
        "How does {name} work?",
        "Tell me about {name}.",
        "{name}",
    ),
}
SMALL_TALK_REPEATS = 5
SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "hi", "Hey", "Good morning"),
        "Hello. Ask me about a module, class or function of Python.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you ChatGPT?", "Tell me about yourself."),
        "I am the demo model of hfax, a very small language model trained on Python's own documentation. "
        "I write text that reads like it; I often get the facts wrong.",
    ),
    (
        ("What can you do?", "Help", "help", "How can you help me?", "What should I ask?"),
        "Ask me what a function, class or module of Python's standard library does, "
        "for instance: What does textwrap.dedent do?",
    ),
    (("Thanks", "Thank you", "Thank you!", "thanks!", "Great, thanks."), "You are welcome."),
    (("Bye", "Goodbye", "bye!", "See you."), "Goodbye."),
    (
        ("What is hfax?", "Tell me about hfax.", "Explain hfax"),
        "hfax runs Hugging Face models through JAX and XLA, on TPUs, GPUs and CPUs. This small model ships with it.",
    ),
    (
        ("How are you?", "How are you today?"),
        "I am a small program, and I am running. Ask me about a module, class or function of Python.",
    ),
)


def plain_page(document: Document, with_heading: bool) -> str:
    """A document as a page of documentation, with or without the line that names the object."""
    if not with_heading:
        return document.text
    title = {"module": f"Module {document.name}", "class": f"class {document.name}", "topic": document.name}.get(
        document.kind
    )
    return f"{title or f'{document.name}({document.signature or chr(46) * 3})'}\n\n{document.text}"


def answer(document: Document) -> str | None:
    """The first prose paragraphs of a document in whole sentences, about 500 characters; None if it has no prose."""
    kept: list[str] = []
    for paragraph in document.text.split("\n\n"):
        is_prose = (
            not re.search(r"^\s|>>>|::=|->|^[-=*]{3}|^[*-] ", paragraph, flags=re.M) and len(paragraph.split()) >= 4
        )
        if not is_prose:
            if kept:
                break
            continue
        if kept and sum(map(len, kept)) + len(paragraph) > ANSWER_CHARACTERS:
            break
        kept.append(_whole_sentences(paragraph))
    if kept and kept[-1].endswith(":"):  # it announces a list or an example that is not here
        kept[-1] = kept[-1].rpartition(". ")[0]
    text = "\n\n".join(paragraph for paragraph in kept if paragraph)
    if len(text) < 25:
        return None
    return text if text[-1] in ".!?)`" else f"{text}."


def _whole_sentences(paragraph: str) -> str:
    if len(paragraph) <= ANSWER_CHARACTERS:
        return paragraph
    end = paragraph.rfind(". ", 0, ANSWER_CHARACTERS)
    return paragraph[: end + 1] if end > 0 else ""


def question(document: Document, rng: random.Random) -> str:
    """One way a person might ask about a document."""
    name = document.name
    if document.kind == "topic":
        name = name if name.startswith("`") else name[0].lower() + name[1:]
    template = rng.choice(QUESTIONS[document.kind])
    return template.format(name=name, short=".".join(name.split(".")[-2:]), signature=document.signature or "...")


def conversation(documents: list[Document], rng: random.Random, system: bool) -> list[Message]:
    """One conversation with a question and an answer for each document that has an answer."""
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if system else []
    for document in documents:
        if reply := answer(document):
            messages.append({"role": "user", "content": question(document, rng)})
            messages.append({"role": "assistant", "content": reply})
    return messages


def epoch_samples(corpus: Corpus, epoch: int, seed: int) -> list[Sample]:
    """All training documents once as pages and, where a person could ask for them, once in a conversation; shuffled.

    The same epoch and seed give the same samples.
    """
    rng = random.Random(f"{seed}/{epoch}")
    samples: list[Sample] = [plain_page(document, rng.random() < 0.75) for document in corpus.train]
    askable = [document for document in corpus.train if document.is_public and answer(document)]
    rng.shuffle(askable)
    while askable:
        turns = rng.choice((1, 1, 1, 2, 3))
        samples.append(conversation(askable[:turns], rng, system=rng.random() < 0.15))
        del askable[:turns]
    for asked, reply in SMALL_TALK:
        for words in asked * SMALL_TALK_REPEATS:
            talk = [{"role": "user", "content": words}, {"role": "assistant", "content": reply}]
            others = [document for document in rng.sample(corpus.train, 8) if document.is_public][
                : rng.choice((0, 0, 1))
            ]
            samples.append(talk + conversation(others, rng, system=False))
    rng.shuffle(samples)
    return samples


def held_out_samples(corpus: Corpus) -> dict[str, list[Sample]]:
    """The held-out documents as `pages` (all of them) and as `chats` (one question each, where one can be asked)."""
    rng = random.Random("held out")
    chats = [conversation([document], rng, system=False) for document in corpus.held_out if document.is_public]
    return {
        "pages": [plain_page(document, with_heading=True) for document in corpus.held_out],
        "chats": [chat for chat in chats if chat],
    }
