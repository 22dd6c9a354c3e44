"""The text that the demo model learns: what is read, what is held out, how it becomes pages and conversations."""

import random

import pytest


@pytest.fixture(scope="module")
def corpus():
    from demo_corpus import read_corpus

    return read_corpus()


@pytest.mark.sweep
def test_corpus_covers_python_sources_c_modules_and_language_topics(corpus):
    by_name = {document.name: document for document in [*corpus.train, *corpus.held_out]}
    assert by_name["textwrap.dedent"].text.startswith("Remove any common leading whitespace from every line")
    assert by_name["textwrap.dedent"].signature == "text"
    assert by_name["math.hypot"].kind == "function"
    assert sum(document.kind == "topic" for document in by_name.values()) > 100
    assert len(corpus.train) > 5000


@pytest.mark.sweep
def test_two_readings_are_equal(corpus):
    from demo_corpus import read_corpus

    assert read_corpus() == corpus


@pytest.mark.sweep
def test_nothing_held_out_is_trained_on(corpus):
    trained_names = {document.name for document in corpus.train}
    trained_openings = {document.text[:60] for document in corpus.train}
    assert len(corpus.held_out) > 100
    for document in corpus.held_out:
        assert document.name not in trained_names
        assert document.text[:60] not in trained_openings


def test_tidy_joins_prose_and_keeps_what_has_structure():
    from demo_corpus import tidy

    prose = "Return the first item of the sequence that is true,\nor the default."
    code = ">>> f(1)\n2"
    item = "* one item that is wrapped\n  onto a second line"
    table = "a      first of all the letters there are\nb      second"
    assert tidy(prose) == prose.replace("\n", " ")
    assert tidy(code) == code
    assert tidy(item) == "* one item that is wrapped onto a second line"
    assert tidy(table) == table
    assert tidy("Use ``x`` of :class:`Y`.") == "Use `x` of `Y`."


def test_answer_is_whole_sentences_of_prose_without_examples():
    from demo_chats import answer
    from demo_corpus import Document

    text = "Return the sum of the items.\n\nRaise TypeError for text:\n\n    >>> total('a')\n\nLater prose is left out."
    document = Document(name="total", kind="function", signature="items", text=text)
    assert answer(document) == "Return the sum of the items."
    assert answer(Document(name="total", kind="function", signature=None, text="total(items) -> int")) is None


@pytest.mark.sweep
def test_epoch_is_decided_by_its_number_and_seed(corpus):
    from demo_chats import epoch_samples

    assert epoch_samples(corpus, 0, seed=0) == epoch_samples(corpus, 0, seed=0)
    assert epoch_samples(corpus, 0, seed=0) != epoch_samples(corpus, 1, seed=0)


@pytest.mark.sweep
def test_conversation_alternates_user_and_assistant(corpus):
    from demo_chats import conversation

    messages = conversation(corpus.train[:40], random.Random(0), system=True)
    assert messages[0]["role"] == "system"
    assert {message["role"] for message in messages[1::2]} == {"user"}
    assert {message["role"] for message in messages[2::2]} == {"assistant"}
